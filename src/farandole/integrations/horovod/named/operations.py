"""Horovod's operations on tensors that wait for their result, and the gradients that flow through them.

The names and the order of the arguments are Horovod's; the arguments are described in asynchronous.py. All functions
raise the errors of their asynchronous form and of synchronize().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from farandole.integrations.horovod.named.asynchronous import (
    allreduce_async,
    alltoall_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
)
from farandole.integrations.horovod.named.calls import (
    Call,
    reduction,
    submit_broadcast,
    submit_exchange,
    submit_gathering,
    submit_reduction,
)
from farandole.integrations.horovod.named.engine import engine
from farandole.integrations.horovod.named.negotiation import Average
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.tensor_queue import Handle, synchronize
from farandole.training.collectives.stages import Kind
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.compression import Compression, Compressor

Submit: TypeAlias = Callable[[Sequence[torch.Tensor]], Handle]
"""Submits tensors to the plain or the grouped form of an operation."""


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
    return _reduce(_AllReduce, call, [tensor], compression, reduction(op, average), scales)[0]


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
    return _differentiable(_AllGather, lambda inputs: submit_gathering(call, inputs), [tensor], process_set)[0]


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
    return _differentiable(
        _Broadcast, lambda inputs: submit_broadcast(call, inputs[0], root_rank), [tensor], root_rank, process_set
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
        >>> rows, counts = fd.alltoall(torch.arange(3), splits=[3])  # all three rows to rank 0, the only worker
        >>> rows
        tensor([0, 1, 2])
    """
    call = Call(Kind.ALLTOALL, name, process_set, is_awaited=True)
    output, received = _differentiable(
        _AllToAll, lambda inputs: submit_exchange(call, inputs[0], splits), [tensor], process_set
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
    return _reduce(_ReduceScatter, call, [tensor], compression, reduction(op), scales)[0]


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


# Several tensors in one operation, all of them together or none -------------------------------------------------------


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
    """Reduce several tensors (all on one device) into new ones. Gradients flow through it.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.grouped_allreduce([torch.ones(2), torch.zeros(1)], name="both")
        [tensor([1., 1.]), tensor([0.])]
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return _reduce(_AllReduce, call, tensors, compression, reduction(op, average), scales)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place.

    See the example of `grouped_allreduce`.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        `tensors`, as a tuple. After an error their contents are undefined.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors, is_awaited=True)
    handle = submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor, in_place=True)
    results: tuple[torch.Tensor, ...] = handle.take()
    return results


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gather the rows of several tensors from all ranks. Gradients flow through it.

    See the example of `allgather`.

    Args:
        tensors: The tensors of this rank; only the numbers of their rows may differ among ranks.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.ALLGATHER, name, process_set, tensors, is_awaited=True)
    return _differentiable(_AllGather, lambda inputs: submit_gathering(call, inputs), tensors, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, and keep this rank's rows of each. Gradients flow through it.

    See the example of `reducescatter`.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Sum or Average; the same on all ranks.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.

    Returns:
        The rows of this rank of each tensor.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return _reduce(_ReduceScatter, call, tensors, compression, reduction(op), scales)


# Sparse tensors, as in gradients of embeddings: entries are gathered, not added up ------------------------------------


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Compute the Sum or Average of a sparse COO tensor (same shape on all ranks, any number of entries).

    Args:
        tensor: A sparse COO tensor, of the same shape and dtype on all ranks, with any number of entries.
        name: The name by which ranks match the operation; None: a running number.
        op: Sum or Average.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A function instead of a handle, as in Horovod: it waits, and returns a sparse tensor in which an index may
        occur several times.

    Raises:
        ValueError: An argument is invalid on this rank.
        NotInitialized: `init()` was not called. The returned function raises what synchronize() raises.

    Examples:
        >>> wait = fd.sparse_allreduce_async(torch.eye(2).to_sparse(), "eye", fd.Sum)
        >>> wait().to_dense()
        tensor([[1., 0.],
                [0., 1.]])
    """
    calls = [
        Call(Kind.ALLGATHER, None if name is None else f"{name}.{part}", process_set) for part in ("indices", "values")
    ]
    indices = submit_gathering(calls[0], [tensor._indices().transpose(0, 1)])
    values = submit_gathering(calls[1], [tensor._values()])

    def wait() -> torch.Tensor:
        # Wait for both before an error is raised: their names are free again afterwards.
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        # Given explicitly, or torch warns of its default.
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.shape, check_invariants=False)

    return wait


# Gradients, as in Horovod. The backward pass is a collective too: all ranks run it, in the same order -----------------


def _reduce(
    function: type[torch.autograd.Function],
    call: Call,
    tensors: Sequence[torch.Tensor],
    compression: Compressor,
    op: Reduction,
    scales: tuple[float, float],
) -> list[torch.Tensor]:
    """Compress the tensors, reduce them as `call`, and decompress the results."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = _differentiable(
        function,
        lambda inputs: submit_reduction(call, inputs, op, *scales),
        [tensor for tensor, _ in compressed],
        op,
        scales,
        call.process_set,
    )
    return [compression.decompress(each, context) for each, (_, context) in zip(results, compressed, strict=True)]


def _differentiable(
    function: type[torch.autograd.Function], submit: Submit, tensors: Sequence[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Submit the tensors and wait; through `function` where gradients are recorded."""
    # `submit` refuses arguments that are not tensors.
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        results: tuple[torch.Tensor, ...] = function.apply(submit, *rest, *tensors)  # type: ignore[no-untyped-call]
        return results
    return _take(submit(tensors))


def _take(handle: Handle) -> tuple[torch.Tensor, ...]:
    """Return the result as a tuple, also for a plain operation."""
    result = handle.take()
    return result if isinstance(result, tuple) else (result,)


class _AllReduce(torch.autograd.Function):
    """The gradient is reduced as the tensor was."""

    @staticmethod
    def forward(
        ctx: Any,
        submit: Submit,
        op: Reduction,
        scales: tuple[float, float],
        members: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.rest = op, scales, members
        return _take(submit(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op, (prescale, postscale), members = ctx.rest
        handle = grouped_allreduce_async(gradients, None, None, op, prescale, postscale, members)
        return (None, None, None, None, *handle.take())


class _AllGather(torch.autograd.Function):
    """The gradient is the average over all ranks of the part that belongs to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, submit: Submit, members: ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        handle = submit(tensors)
        results = _take(handle)
        ctx.members, ctx.shapes, ctx.received = members, [tensor.shape for tensor in tensors], handle.received
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = grouped_allreduce_async(gradients, op=Reduction.AVERAGE, process_set=ctx.members)
        place = ctx.members.rank()
        mine = [
            average.split(rows)[place].view(shape)
            for average, rows, shape in zip(handle.take(), ctx.received, ctx.shapes, strict=True)
        ]
        return (None, None, *mine)


class _Broadcast(torch.autograd.Function):
    """The root's gradient is the average over all ranks; that of the others is zero."""

    @staticmethod
    def forward(
        ctx: Any, submit: Submit, root_rank: int, members: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.root_rank, ctx.members = root_rank, members
        return _take(submit([tensor]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = allreduce_async(gradients[0], op=Reduction.AVERAGE, process_set=ctx.members)
        average = handle.take()
        return None, None, None, average if engine().rank == ctx.root_rank else torch.zeros_like(average)


class _AllToAll(torch.autograd.Function):
    """The rows of the gradient go back to the ranks that the tensor's rows came from."""

    @staticmethod
    def forward(
        ctx: Any, submit: Submit, members: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = submit([tensor]).take()
        ctx.members, ctx.received, ctx.rows = members, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = alltoall_async(gradients[0], ctx.received, process_set=ctx.members)
        back, _ = handle.take()
        kept = back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])  # rows that no rank received
        return None, None, torch.cat([back, kept])


class _ReduceScatter(torch.autograd.Function):
    """The gradient gathers the rows of all, times the number of ranks for a Sum, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any,
        submit: Submit,
        op: Reduction,
        scales: tuple[float, float],
        members: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.members, ctx.factor = members, scales[0] * scales[1]
        if op is Reduction.SUM:
            ctx.factor *= members.size()
        return _take(submit(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        scaled = [gradient * ctx.factor for gradient in gradients]
        handle = grouped_allgather_async(scaled, process_set=ctx.members)
        return (None, None, None, None, *handle.take())
