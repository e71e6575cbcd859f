"""Horovod's operations that return a handle at once. operations.py has those that wait, and describes the arguments.

All of them may be called from any thread, and in any order on different ranks: operations are matched by their name,
unnamed ones by their running number. Tensors may lie on any device and need not be contiguous; they must not be changed
before the handle is synchronized. They raise what this rank alone can find, and the error that ended the generation,
when it has ended. synchronize() raises later errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from farandole.integrations.horovod.named.calls import (
    Call,
    reduction,
    submit_broadcast,
    submit_exchange,
    submit_gathering,
    submit_reduction,
)
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.stages import Kind
from farandole.integrations.horovod.named.tensor_queue import Handle, synchronize
from farandole.training.collectives.transport import Reduction


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Return a handle of `allreduce` at once, for synchronize() and poll().

    Arguments and errors are those of `allreduce`. See the example of `synchronize`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set)
    return submit_reduction(call, [tensor], reduction(op, average), prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Return a handle of `allreduce_` at once, which reduces `tensor` in place.

    Arguments and errors are those of `allreduce`. See the example of `synchronize`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set)
    return submit_reduction(call, [tensor], reduction(op, average), prescale_factor, postscale_factor, in_place=True)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Return a handle of `grouped_allreduce` at once.

    Arguments and errors are those of `grouped_allreduce`. See the example of `synchronize`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Return a handle of `grouped_allreduce_` at once, which reduces `tensors` in place.

    Arguments and errors are those of `grouped_allreduce`. See the example of `synchronize`.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Compute the Sum or Average of a sparse tensor: entries are gathered, not added up.

    The other arguments and the errors are those of `allreduce`.

    Args:
        tensor: A sparse COO tensor, of the same shape and dtype on all ranks, with any number of entries.
        op: Sum or Average.

    Returns:
        A function instead of a handle, as in Horovod: it waits, and returns a sparse tensor in which an index may
        occur several times.

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
        if op == Reduction.AVERAGE:
            all_values = all_values / process_set.size()
        # Given explicitly, or torch warns of its default.
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.shape, check_invariants=False)

    return wait


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Return a handle of `allgather` at once.

    Arguments and errors are those of `allgather`. See the example of `synchronize`.
    """
    return submit_gathering(Call(Kind.ALLGATHER, name, process_set), [tensor])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Return a handle of `grouped_allgather` at once.

    Arguments and errors are those of `grouped_allgather`. See the example of `synchronize`.
    """
    return submit_gathering(Call(Kind.ALLGATHER, name, process_set, tensors), tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Return a handle of `broadcast` at once.

    Arguments and errors are those of `broadcast`. See the example of `synchronize`.
    """
    return submit_broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Return a handle of `broadcast_` at once, which overwrites `tensor`.

    Arguments and errors are those of `broadcast`. See the example of `synchronize`.
    """
    return submit_broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Return a handle of `alltoall` at once; synchronize() returns a pair, also without `splits`.

    Arguments and errors are those of `alltoall`. See the example of `synchronize`.
    """
    return submit_exchange(Call(Kind.ALLTOALL, name, process_set), tensor, splits)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Return a handle of `reducescatter` at once.

    Arguments and errors are those of `reducescatter`. See the example of `synchronize`.
    """
    call = Call(Kind.REDUCESCATTER, name, process_set)
    return submit_reduction(call, [tensor], reduction(op), prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Return a handle of `grouped_reducescatter` at once.

    Arguments and errors are those of `grouped_reducescatter`. See the example of `synchronize`.
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op), prescale_factor, postscale_factor)
