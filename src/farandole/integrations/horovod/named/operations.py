"""Horovod's operations on tensors that wait for their result, and the gradients that flow through them.

The names and the order of the arguments are Horovod's; the arguments are described in asynchronous.py. All functions
raise the errors of their asynchronous form and of synchronize().
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.integrations.horovod.named.asynchronous import (
    broadcast_async_,
)
from farandole.integrations.horovod.named.calls import (
    Call,
    reduction,
    submit_broadcast,
    submit_exchange,
    submit_gathering,
    submit_reduction,
)
from farandole.integrations.horovod.named.differentiable import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
    differentiable,
    reduce,
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
        tensor: The same shape and dtype on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A new tensor of the same shape and dtype, on the device of `tensor`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.allreduce(torch.tensor([1.0, 2.0]), op=fd.Sum)  # on one worker
        tensor([1., 2.])
    """
    call = Call(Kind.ALLREDUCE, name, process_set, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(AllReduce, call, [tensor], compression, reduction(op, average), scales)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place, and return it. After an error its content is undefined.

    See the example of `allreduce`.

    Args:
        tensor: The same shape and dtype on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        `tensor`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, is_awaited=True)
    handle = submit_reduction(call, [tensor], reduction(op, average), prescale_factor, postscale_factor, in_place=True)
    result: torch.Tensor = handle.take()
    return result


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gather the rows of all ranks' tensors, in the order of the ranks. Gradients flow through it.

    Args:
        tensor: Only the number of rows may differ among ranks (0 is allowed); a scalar counts as one row.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A new tensor with the rows of all ranks.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.allgather(torch.tensor([[1, 2]]))  # on one worker
        tensor([[1, 2]])
    """
    call = Call(Kind.ALLGATHER, name, process_set, is_awaited=True)
    return differentiable(AllGather, lambda inputs: submit_gathering(call, inputs), [tensor], process_set)[0]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the tensor of `root_rank` into a new one. Gradients flow through it.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: A global rank, also in a process set.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A new tensor that equals the root's.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.broadcast(torch.tensor([7]), root_rank=0)
        tensor([7])
    """
    call = Call(Kind.BROADCAST, name, process_set, is_awaited=True)
    return differentiable(
        Broadcast, lambda inputs: submit_broadcast(call, inputs[0], root_rank), [tensor], root_rank, process_set
    )[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with that of `root_rank`, and return it.

    See the example of `broadcast`.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: A global rank, also in a process set.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        `tensor`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
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

    Args:
        tensor: The rows for all ranks; the first ones go to rank 0.
        splits: The number of rows for each rank; None to split them evenly.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        The received rows. With `splits` a pair: the tensor, and the number of its rows from each rank (int32, on
        the device of `splits`).

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> rows, counts = fd.alltoall(torch.arange(3 * fd.size()), splits=[3] * fd.size())  # three rows to each rank
        >>> rows  # of a worker that is alone
        tensor([0, 1, 2])
    """
    call = Call(Kind.ALLTOALL, name, process_set, is_awaited=True)
    output, received = differentiable(
        AllToAll, lambda inputs: submit_exchange(call, inputs[0], splits), [tensor], process_set
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

    Args:
        tensor: The same shape and dtype on all ranks, with at least one dimension.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Sum or Average; the same on all ranks.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.

    Returns:
        The rows of this rank. The first ranks get one more where the rows cannot be divided evenly.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.reducescatter(torch.tensor([1.0, 2.0]), op=fd.Sum)  # on one worker: all rows
        tensor([1., 2.])
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(ReduceScatter, call, [tensor], compression, reduction(op), scales)[0]


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have done so.

    Meanwhile it contributes zeros to the reductions of the others. An Average is still divided by the number of all
    ranks. Operations other than reductions fail on the others, with CollectiveMismatch.

    Args:
        device: Accepted for Horovod's scripts; zeros need no device here.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
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

    Args:
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        ValueError: The process set was not added, or lacks this rank.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.barrier()
    """
    call = Call(Kind.BARRIER, None, process_set, is_awaited=True)
    call.add()
    call.submit().take()
