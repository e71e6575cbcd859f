"""Horovod's operations on tensors that wait for their result; the asynchronous ones are re-exported.

Arguments as in asynchronous.py. All raise the errors of their asynchronous form and of synchronize().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from farandole.collectives.named import autograd
from farandole.collectives.named.asynchronous import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reducescatter_async,
    reduction,
    submit_gathering,
    submit_reduction,
)
from farandole.collectives.named.building import Call
from farandole.collectives.named.compression import Compression, Compressor
from farandole.collectives.named.handles import poll, synchronize
from farandole.collectives.named.operation_requests import Kind
from farandole.collectives.named.process_sets import ProcessSet, global_process_set
from farandole.collectives.named.settings import Average
from farandole.collectives.transport import Reduction

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


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
        compression: Converts the tensor for the reduction, and the result back.

    Returns:
        A tensor of the same shape, on the device of `tensor`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set)
    how, scales = reduction(op, average), (prescale_factor, postscale_factor)
    small, context = compression.compress(tensor)
    (result,) = autograd.all_reduce(
        lambda inputs: submit_reduction(call, inputs, how, *scales),
        [small],
        how,
        scales,
        process_set,
    )
    return compression.decompress(result, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place, and return it. After an error its content is undefined."""
    call = Call(Kind.ALLREDUCE, name, process_set)
    how = reduction(op, average)
    result: torch.Tensor = submit_reduction(
        call, [tensor], how, prescale_factor, postscale_factor, in_place=True
    ).take()
    return result


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gather the rows of all ranks' tensors, in the order of the ranks. Gradients flow through it.

    Args:
        tensor: Only the number of rows may differ among ranks (0 is allowed); a scalar counts as one row.

    Returns:
        A new tensor with the rows of all ranks.
    """
    (result,) = autograd.all_gather(lambda inputs: allgather_async(inputs[0], name, process_set), [tensor], process_set)
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the tensor of `root_rank` into a new one. Gradients flow through it.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: A global rank, also in a process set.

    Returns:
        A tensor that equals the root's.
    """
    return autograd.broadcast(
        lambda inputs: broadcast_async(inputs[0], root_rank, name, process_set), tensor, root_rank, process_set
    )


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with that of `root_rank`, and return it.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: A global rank, also in a process set.
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

    Returns:
        The received rows. With `splits` a pair: the tensor, and the number of its rows from each rank (int32, on the
        CPU).
    """
    output, received = autograd.all_to_all(
        lambda inputs: alltoall_async(inputs[0], splits, name, process_set), tensor, process_set
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
        compression: Converts the tensor for the reduction, and the result back.
        op: Sum or Average.

    Returns:
        The rows of this rank. The first ranks get one more where the rows cannot be divided evenly.
    """
    call = Call(Kind.REDUCESCATTER, name, process_set)
    how, scales = reduction(op), (prescale_factor, postscale_factor)
    small, context = compression.compress(tensor)
    (result,) = autograd.reduce_scatter(
        lambda inputs: submit_reduction(call, inputs, how, *scales),
        [small],
        how,
        scales,
        process_set,
    )
    return compression.decompress(result, context)


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have done so.

    Meanwhile it contributes zeros to the reductions of the others. An Average is still divided by the number of all
    ranks. Operations other than reductions fail on the others, with CollectiveMismatch.

    Args:
        device: Accepted for Horovod's scripts; zeros need no device here.

    Returns:
        The rank that joined last.
    """
    call = Call(Kind.JOIN, None, global_process_set)
    call.add()
    last: int = call.submit().take()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the process set have called it; other operations may be outstanding."""
    call = Call(Kind.BARRIER, None, process_set)
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
    """Reduce several tensors (all on one device) into new ones. Gradients flow through it."""
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    how, scales = reduction(op, average), (prescale_factor, postscale_factor)
    small, contexts = _compress(tensors, compression)
    results = autograd.all_reduce(
        lambda inputs: submit_reduction(call, inputs, how, *scales),
        small,
        how,
        scales,
        process_set,
    )
    return [compression.decompress(each, context) for each, context in zip(results, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place."""
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    how = reduction(op, average)
    results: tuple[torch.Tensor, ...] = submit_reduction(
        call, tensors, how, prescale_factor, postscale_factor, in_place=True
    ).take()
    return results


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gather the rows of several tensors from all ranks. Gradients flow through it."""
    call = Call(Kind.ALLGATHER, name, process_set, tensors)
    return autograd.all_gather(lambda inputs: submit_gathering(call, inputs), tensors, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, and keep this rank's rows of each. Gradients flow through it."""
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors)
    how, scales = reduction(op), (prescale_factor, postscale_factor)
    small, contexts = _compress(tensors, compression)
    results = autograd.reduce_scatter(
        lambda inputs: submit_reduction(call, inputs, how, *scales),
        small,
        how,
        scales,
        process_set,
    )
    return [compression.decompress(each, context) for each, context in zip(results, contexts, strict=True)]


def _compress(
    tensors: Sequence[torch.Tensor], compression: Compressor
) -> tuple[Sequence[torch.Tensor], Sequence[object]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]


# Sparse tensors, as in gradients of embeddings: entries are gathered, not added up ------------------------------------


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Compute the Sum or Average of a sparse COO tensor (same shape on all ranks, any number of entries).

    Returns:
        A function instead of a handle (as in Horovod): it waits, and returns a sparse tensor in which an index may
        occur several times.
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
