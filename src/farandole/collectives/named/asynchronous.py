"""Operations that return a handle at once: Horovod's names and order of arguments. operations.py has the others.

All of them may be called from any thread, and in any order on different ranks: operations are matched by their name,
unnamed ones by their running number. Tensors may lie on any device and need not be contiguous; they must not be changed
before the handle is synchronized.

Args:
    tensor: Of any shape, int32, int64, float16, bfloat16, float32, float64 or bool; any dtype where nothing is reduced.
    average: Deprecated: True for op=Average, False for op=Sum.
    op: Average (if None), Sum, Min, Max, Product or Adasum. The average of integers is truncated toward zero.
    prescale_factor, postscale_factor: Factors of the tensor before and after the reduction.
    process_set: The ranks that take part.

Raises:
    ValueError: The arguments are invalid, the name is in flight already, or the process set lacks this rank.
    NotInitialized: Called before init().

They also raise the error that ended the generation, when it has ended. synchronize() raises later errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from farandole.collectives.named.building import (
    Call,
    check_reduction,
    check_root,
    check_same_device,
    check_tensor,
    splits_of,
)
from farandole.collectives.named.handles import Handle
from farandole.collectives.named.operation_requests import Kind
from farandole.collectives.named.process_sets import ProcessSet, global_process_set
from farandole.collectives.transport import Reduction
from farandole.errors import HorovodInternalError


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce `tensor` (same shape and dtype on all ranks) into a new one."""
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
    """Reduce `tensor` in place. After an error its content is undefined."""
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
    """Reduce several tensors (all on one device) into new ones: all of them together, or none."""
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
    """Reduce several tensors in place."""
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor, in_place=True)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather the rows of all ranks' tensors, in the order of the ranks.

    Only the number of rows may differ (0 is allowed); a scalar counts as one row.
    """
    return submit_gathering(Call(Kind.ALLGATHER, name, process_set), [tensor])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather the rows of several tensors, all of them together or none."""
    return submit_gathering(Call(Kind.ALLGATHER, name, process_set, tensors), tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy the tensor of `root_rank` (a global rank, also in a process set) into a new one."""
    return _broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank, in_place=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Overwrite `tensor` with that of `root_rank` (a global rank, also in a process set)."""
    return _broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send some rows to each rank, and receive some rows from each.

    Args:
        splits: The number of rows for each rank, the first ones going to rank 0; None to split them evenly.

    Returns:
        A handle; synchronize() returns (tensor, rows received from each rank).
    """
    call = Call(Kind.ALLTOALL, name, process_set)
    check_tensor(call, tensor, at_least_1d=True)
    call.add(tensor, splits=splits_of(call, tensor, splits))
    return call.submit()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce `tensor` by Sum or Average; this rank gets its part of the rows.

    The first ranks get one more where the rows cannot be divided evenly.
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
    """Reduce several tensors and scatter the rows of each, all of them together or none."""
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op), prescale_factor, postscale_factor)


def reduction(op: int | None, average: bool | None = None) -> Reduction:
    """Return the operator that `op` and the deprecated `average` select.

    Raises ValueError if both are given, or for another op.
    """
    if average is None:
        try:
            return Reduction.AVERAGE if op is None else Reduction(op)
        except ValueError:
            names = ", ".join(each.name.capitalize() for each in Reduction)
            raise ValueError(f"op must be one of {names}, got {op!r}") from None
    if op is not None:
        raise ValueError(f"op and average say the same thing; give op only (got op={op!r} and average={average!r})")
    warnings.warn("average= is deprecated; give op=Average or op=Sum instead", DeprecationWarning, stacklevel=3)
    return Reduction.AVERAGE if average else Reduction.SUM


def submit_reduction(
    call: Call,
    tensors: Sequence[torch.Tensor],
    op: Reduction,
    prescale: float,
    postscale: float,
    *,
    in_place: bool = False,
) -> Handle:
    """Submit an allreduce or reducescatter of these tensors as `call`."""
    scatters = call.kind is Kind.REDUCESCATTER
    if scatters and op not in (Reduction.SUM, Reduction.AVERAGE):
        # Horovod's error for this case, which scripts may catch; all ranks are concerned, not one rank's tensor.
        raise HorovodInternalError(f"{call.name}: a reducescatter takes op=Sum or op=Average, got {op.name}")
    for tensor in tensors:
        check_tensor(call, tensor, at_least_1d=scatters)
        check_reduction(call, tensor, op, (prescale, postscale))
    check_same_device(call, tensors)
    for tensor in tensors:
        call.add(tensor, in_place=in_place, op=op, prescale=prescale, postscale=postscale)
    return call.submit()


def submit_gathering(call: Call, tensors: Sequence[torch.Tensor]) -> Handle:
    """Submit an allgather of these tensors as `call`."""
    for tensor in tensors:
        check_tensor(call, tensor)
    check_same_device(call, tensors)
    for tensor in tensors:
        call.add(tensor, shape=tensor.shape or (1,))
    return call.submit()


def _broadcast(call: Call, tensor: torch.Tensor, root_rank: int, *, in_place: bool) -> Handle:
    check_tensor(call, tensor)
    check_root(call, root_rank)
    call.add(tensor, root=root_rank, in_place=in_place)
    return call.submit()
