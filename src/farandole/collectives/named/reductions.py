"""Run allreduce and reducescatter on tensors through a transport. execution.py calls it, in the collectives' thread.

In an allreduce, this rank's operation `mine` is None when this rank has joined: then it contributes zeros.
"""

from __future__ import annotations

import torch

from farandole.collectives.named import adasum
from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Agreed, Request
from farandole.collectives.named.scaling import postscale, prescale
from farandole.collectives.reduction import Reduction
from farandole.collectives.shared_memory.tensors import shareable_zeros
from farandole.collectives.tensor_bytes import flat_view
from farandole.collectives.transport import Transport

_SUMMED = {Reduction.AVERAGE: Reduction.SUM}
_LOGICAL = {Reduction.SUM: Reduction.MAX, Reduction.PRODUCT: Reduction.MIN}
"""Bools travel as uint8: their sum is `or`, their product is `and`."""


class FusionBuffers:
    """Flat buffers in which many small tensors are reduced together; one for each dtype, kept for reuse."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return an uninitialized buffer; valid until the next call with this dtype."""
        buffer = self._by_dtype.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._by_dtype[dtype] = shareable_zeros(numel, dtype)
        return buffer[:numel]


def all_reduce(agreed: Agreed, mine: Operation | None, transport: Transport) -> None:
    """Reduce one tensor in its own memory or in a copy of it."""
    part = agreed.any_part
    tensor = torch.zeros(part.shape, dtype=dtype_named(part.dtype)) if mine is None else mine.buffer()
    _reduce(_numbers(tensor), part, transport)
    if mine is not None:
        mine.deliver(tensor)


def all_reduce_fused(
    agreed: tuple[Agreed, ...], mine: list[Operation | None], transport: Transport, buffers: FusionBuffers
) -> None:
    """Reduce several tensors of one dtype, op and scale by one reduction of a flat buffer."""
    parts = [each.any_part for each in agreed]
    sizes = [torch.Size(part.shape).numel() for part in parts]
    dtype = dtype_named(parts[0].dtype)
    flat = buffers.take(dtype, sum(sizes))
    slots = torch.split(flat, sizes)
    for slot, operation in zip(slots, mine, strict=True):
        if operation is None:
            slot.zero_()
        else:
            slot.copy_(operation.read().view(-1))
    _reduce(_numbers(flat), parts[0], transport)
    for slot, part, operation in zip(slots, parts, mine, strict=True):
        if operation is not None:
            # Out of place and on the CPU the slot itself must not be returned: it is used again.
            result = slot.view(part.shape)
            operation.deliver(result if operation.in_place or operation.stream is not None else result.clone())


def reduce_scatter(agreed: Agreed, mine: Operation, transport: Transport) -> None:
    """Reduce the whole tensor, and keep this rank's rows: the first ranks get one more if they divide unevenly."""
    tensor = mine.buffer()
    _reduce(_numbers(tensor), agreed.any_part, transport)
    start, stop = rows_of(transport.rank, tensor.shape[0], transport.size)
    mine.deliver(tensor[start:stop].clone())


def rows_of(rank: int, rows: int, size: int) -> tuple[int, int]:
    """Return the first row, and the row after the last, of rank `rank` in a reducescatter."""
    share, extra = divmod(rows, size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a request."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory, flat, in a dtype that a transport reduces."""
    return flat_view(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)


def _reduce(flat: torch.Tensor, part: Request, transport: Transport) -> None:
    """Reduce a flat tensor in place as all ranks have agreed."""
    op = Reduction(part.op)
    if part.dtype == "bool":
        transport.all_reduce(flat, op=_LOGICAL.get(op, op))
        return
    prescale(flat, part.prescale)
    if op is Reduction.ADASUM:
        adasum.reduce(flat, transport)
    elif transport.size > 1:
        transport.all_reduce(flat, op=_SUMMED.get(op, op))
    postscale(flat, op, transport.size, part.postscale)
