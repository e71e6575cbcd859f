"""Horovod's operations on tensors that wait for their result, and the gradients that flow through them.

The names and the order of the arguments are Horovod's. All functions raise the errors of their asynchronous form and of
synchronize(). A grouped function takes several tensors: all of them are reduced or gathered together, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from farandole.integrations.horovod.named.asynchronous import broadcast_async_
from farandole.integrations.horovod.named.calls import (
    Call,
    reduction,
    submit_broadcast,
    submit_exchange,
    submit_gathering,
    submit_reduction,
)
from farandole.integrations.horovod.named.differentiable import (
    differentiable,
    own_rows_gradient,
    reduce,
    returned_gradient,
    root_gradient,
)
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.stages import Kind
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.compression import Compression, Compressor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` into a new one. Gradients flow through it.

    Args:
        tensor: The same shape and dtype on all ranks: int32, int64, float16, bfloat16, float32, float64 or bool.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks. The average of
            integers is truncated toward zero.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A new tensor of the same shape and dtype, on the device of `tensor`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the process set, or the name,
            which may be in flight already.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.allreduce(torch.tensor([1.0, 2.0]), op=fd.Sum)  # on one worker
        tensor([1., 2.])
    """
    call = Call(Kind.ALLREDUCE, name, process_set, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(call, [tensor], compression, reduction(op, average), scales)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return `tensor`, reduced in place. After an error its content is undefined.

    Arguments and errors are those of `allreduce`. See the example of `allreduce`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, is_awaited=True)
    handle = submit_reduction(call, [tensor], reduction(op, average), prescale_factor, postscale_factor, in_place=True)
    result: torch.Tensor = handle.take()
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors into new ones. Gradients flow through it.

    The other arguments and the errors are those of `allreduce`.

    Args:
        tensors: The tensors of this rank, all on one device, in the same order and with the same shapes and dtypes on
            all ranks.

    Returns:
        New tensors, in the order of `tensors`.

    Examples:
        >>> fd.grouped_allreduce([torch.ones(2), torch.zeros(1)], name="both")
        [tensor([1., 1.]), tensor([0.])]
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(call, tensors, compression, reduction(op, average), scales)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Return `tensors`, reduced in place, as a tuple. After an error their contents are undefined.

    Arguments and errors are those of `grouped_allreduce`. See the example of `grouped_allreduce`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors, is_awaited=True)
    handle = submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor, in_place=True)
    results: tuple[torch.Tensor, ...] = handle.take()
    return results


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gather the rows of all ranks' tensors, in the order of the ranks. Gradients flow through it.

    The other arguments and the errors are those of `allreduce`.

    Args:
        tensor: Of any dtype. Only the number of rows may differ among ranks (0 is allowed); a scalar counts as one row.

    Returns:
        A new tensor with the rows of all ranks.

    Examples:
        >>> fd.allgather(torch.tensor([[1, 2]]))  # on one worker
        tensor([[1, 2]])
    """
    call = Call(Kind.ALLGATHER, name, process_set, is_awaited=True)
    return differentiable(partial(submit_gathering, call), [tensor], own_rows_gradient(process_set))[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return the rows of several tensors from all ranks, in the order of `tensors`. Gradients flow through it.

    The other arguments and the errors are those of `allgather`. See the example of `allgather`.

    Args:
        tensors: The tensors of this rank, all on one device; only the numbers of their rows may differ among ranks.
    """
    call = Call(Kind.ALLGATHER, name, process_set, tensors, is_awaited=True)
    return differentiable(partial(submit_gathering, call), tensors, own_rows_gradient(process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the tensor of `root_rank` into a new one. Gradients flow through it.

    The other arguments and the errors are those of `allreduce`.

    Args:
        tensor: The same shape and dtype on all ranks; any dtype.
        root_rank: A global rank, also in a process set.

    Returns:
        A new tensor that equals the root's.

    Examples:
        >>> fd.broadcast(torch.tensor([7]), root_rank=0)
        tensor([7])
    """
    call = Call(Kind.BROADCAST, name, process_set, is_awaited=True)
    gradient = root_gradient(root_rank, process_set)
    return differentiable(lambda inputs: submit_broadcast(call, inputs[0], root_rank), [tensor], gradient)[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return `tensor`, overwritten with that of `root_rank`.

    Arguments and errors are those of `broadcast`. See the example of `broadcast`.
    """
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).take()
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows to each rank, and receive some rows from each. Gradients flow through it.

    The other arguments and the errors are those of `allreduce`.

    Args:
        tensor: The rows for all ranks, of any dtype; the first ones go to rank 0.
        splits: The number of rows for each rank; None to split them evenly.

    Returns:
        The received rows. With `splits` a pair: the tensor, and the number of its rows from each rank (int32, on
        the device of `splits`).

    Examples:
        >>> rows, counts = fd.alltoall(torch.arange(3 * fd.size()), splits=[3] * fd.size())  # three rows to each rank
        >>> rows  # of a worker that is alone
        tensor([0, 1, 2])
    """
    call = Call(Kind.ALLTOALL, name, process_set, is_awaited=True)
    output, received = differentiable(
        lambda inputs: submit_exchange(call, inputs[0], splits), [tensor], returned_gradient(process_set)
    )
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce `tensor`, and keep this rank's part of the rows. Gradients flow through it.

    The other arguments and the errors are those of `allreduce`.

    Args:
        tensor: The same shape and dtype on all ranks, with at least one dimension.
        op: Sum or Average; the same on all ranks.

    Returns:
        The rows of this rank. The first ranks get one more where the rows cannot be divided evenly.

    Examples:
        >>> fd.reducescatter(torch.tensor([1.0, 2.0]), op=fd.Sum)  # on one worker: all rows
        tensor([1., 2.])
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(call, [tensor], compression, reduction(op), scales)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the rows of this rank of each of several reduced tensors. Gradients flow through it.

    The other arguments and the errors are those of `reducescatter`. See the example of `reducescatter`.

    Args:
        tensors: The tensors of this rank, as those of `grouped_allreduce`, each with at least one dimension.
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(call, tensors, compression, reduction(op), scales)


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have done so.

    Meanwhile it contributes zeros to the reductions of the others. An Average is still divided by the number of all
    ranks. Operations other than reductions fail on the others, with CollectiveMismatch.

    Args:
        device: Accepted for Horovod's scripts; zeros need no device here.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: As from `allreduce`.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.join()  # on one worker
        0
    """
    call = Call(Kind.JOIN, None, global_process_set, is_awaited=True)
    call.add()
    last: int = call.submit().take()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the process set have called it; other operations may be outstanding.

    Arguments and errors are those of `allreduce`.

    Examples:
        >>> fd.barrier()
    """
    call = Call(Kind.BARRIER, None, process_set, is_awaited=True)
    call.add()
    call.submit().take()
