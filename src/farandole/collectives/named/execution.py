"""Execute the decisions of a round: each kind of operation by its function, on tensors, through a transport."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from farandole.collectives.named import adasum
from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Agreed, Kind, Request
from farandole.collectives.named.timeline import Timeline
from farandole.collectives.shared_memory.tensors import shareable_zeros
from farandole.collectives.tensor_bytes import byte_view, flat_view
from farandole.collectives.transport import Reduction, Transport


class Execution:
    """Executes operations in one thread, and keeps the flat buffers of one generation."""

    def __init__(self, timeline: Timeline) -> None:
        self._buffers = FusionBuffers()
        self._timeline = timeline

    def carry_out(self, agreed: tuple[Agreed, ...], mine: list[Operation | None], transport: Transport) -> None:
        """Execute one operation, or several allreduces that share a flat buffer, on the transport of their process set.

        Ends each of them with a result, or with an error of this rank alone. Raises the errors of the transport; then
        some operations have not ended.

        `mine` are this rank's operations, in the same order; None where it contributes zeros because it has joined.
        """
        first, kind = agreed[0], agreed[0].key.kind
        with torch.no_grad(), self._shown(agreed):
            if len(agreed) > 1:
                all_reduce_fused(agreed, mine, transport, self._buffers)
            elif kind is Kind.ALLREDUCE:
                all_reduce(first, mine[0], transport)
            elif kind is Kind.BARRIER:
                if mine[0] is not None:  # a barrier needs no more than the requests of all ranks
                    mine[0].finish(None)
            elif mine[0] is None:
                raise AssertionError(f"{first.key} was agreed on without this rank")
            else:
                _FUNCTIONS[kind](first, mine[0], transport)

    @contextlib.contextmanager
    def _shown(self, agreed: tuple[Agreed, ...]) -> Iterator[None]:
        """Record the operations on the timeline, if there is one."""
        if not self._timeline.is_on:
            yield
            return
        for each in agreed:
            self._timeline.begin(each.key.name, each.key.kind.name)
        try:
            yield
        finally:
            for each in agreed:
                self._timeline.end(each.key.name)


# Allgather, broadcast and alltoall: bytes, so that any dtype will do --------------------------------------------------
#
# Shapes are known from the requests of all ranks; they are not exchanged again.

# Up to this size every rank's bytes, padded to the longest, travel in one exchange; beyond, in one broadcast each. A
# broadcast is a pipeline, so that all of them together keep every link as busy as a ring all-gather would.
_TOGETHER_BYTES = 64 * 1024


def all_gather(agreed: Agreed, mine: Operation, transport: Transport) -> None:
    """Gather all ranks' rows, in the order of the ranks. The handle also gets the number of rows from each."""
    parts = _all_parts(agreed)
    rows = [part.shape[0] for part in parts]
    whole = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype_named(parts[0].dtype))
    _gather_bytes(mine.read(), [as_bytes(slot) for slot in torch.split(whole, rows)], transport)
    mine.deliver(whole, rows)


def broadcast(agreed: Agreed, mine: Operation, transport: Transport) -> None:
    """Copy the root's tensor into a new tensor or in place."""
    root = agreed.ranks.index(agreed.any_part.root)
    if transport.rank == root or (mine.in_place and mine.stream is None):
        tensor = mine.buffer()
    else:
        tensor = torch.empty(mine.request.shape, dtype=dtype_named(mine.request.dtype))
    transport.broadcast(as_bytes(tensor), root)
    mine.deliver(tensor)


def all_to_all(agreed: Agreed, mine: Operation, transport: Transport) -> None:
    """Receive from each rank the rows that it split off for this one. The handle also gets their number by rank.

    Every rank sees all bytes: a ring passes most of them through every rank anyway.
    """
    parts, place = _all_parts(agreed), transport.rank
    dtype, row_shape = dtype_named(parts[0].dtype), parts[0].shape[1:]
    received = [part.splits[place] for part in parts]
    whole = torch.empty((sum(received), *row_shape), dtype=dtype)
    sent = [sum(part.splits) for part in parts]
    own = mine.read()[: sent[place]]
    if _travels_together([rows * _row_bytes(parts[0]) for rows in sent]):
        everything = [torch.empty((rows, *row_shape), dtype=dtype) for rows in sent]
        _gather_bytes(own, [as_bytes(each) for each in everything], transport)
        for slot, tensor, part in zip(torch.split(whole, received), everything, parts, strict=True):
            slot.copy_(_cut(tensor, part, place))
    else:
        for source, (slot, part) in enumerate(zip(torch.split(whole, received), parts, strict=True)):
            # One rank's tensor after the other, so that they are never all in memory at once.
            tensor = own if source == place else torch.empty((sent[source], *row_shape), dtype=dtype)
            transport.broadcast(as_bytes(tensor), source)
            slot.copy_(_cut(tensor, part, place))
    mine.deliver(whole, received)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous CPU tensor as flat uint8; writing into it writes into the tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def _gather_bytes(own: torch.Tensor, slots: list[torch.Tensor], transport: Transport) -> None:
    """Fill the slots (as_bytes) of all ranks; `own` is this rank's tensor."""
    lengths = [slot.numel() for slot in slots]
    if not _travels_together(lengths):
        slots[transport.rank].copy_(as_bytes(own))
        for source, slot in enumerate(slots):
            if slot.numel():
                transport.broadcast(slot, source)
        return
    trailer = bytes(byte_view(as_bytes(own))).ljust(max(lengths), b"\0")
    for slot, arrived in zip(slots, transport.all_reduce(torch.empty(0), trailer), strict=True):
        if slot.numel():
            byte_view(slot)[:] = arrived[: slot.numel()]


def _travels_together(lengths: list[int]) -> bool:
    return max(lengths) * len(lengths) <= _TOGETHER_BYTES


def _all_parts(agreed: Agreed) -> list[Request]:
    parts = [part for part in agreed.parts if part is not None]
    assert len(parts) == len(agreed.ranks), f"{agreed.key} was agreed though a rank had joined"
    return parts


def _row_bytes(part: Request) -> int:
    return torch.Size(part.shape[1:]).numel() * dtype_named(part.dtype).itemsize


def _cut(tensor: torch.Tensor, part: Request, place: int) -> torch.Tensor:
    """Return the rows of one rank's tensor for the member at `place`."""
    start = sum(part.splits[:place])
    return tensor[start : start + part.splits[place]]


# Allreduce and reducescatter: numbers ---------------------------------------------------------------------------------
#
# In an allreduce, this rank's operation `mine` is None when this rank has joined: then it contributes zeros.

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


# Scaling of numbers before and after they are summed, in place, by Horovod's rules for each dtype ---------------------

_HALVES = (torch.float16, torch.bfloat16)


def prescale(flat: torch.Tensor, factor: float) -> None:
    """Multiply every element. Integers are multiplied in float64 and truncated toward zero, halves in float32."""
    if factor != 1.0:
        _multiply(flat, factor)


def postscale(flat: torch.Tensor, op: Reduction, size: int, factor: float) -> None:
    """Turn the sum over `size` ranks into the requested result: divide it for an AVERAGE, then multiply it.

    Integers are truncated toward zero, once.
    """
    if op is not Reduction.AVERAGE:
        prescale(flat, factor)
    elif flat.dtype in _HALVES:
        flat.copy_(flat.float().div_(size).mul_(factor))
    elif flat.is_floating_point():
        flat.div_(size)
        prescale(flat, factor)
    elif factor == 1.0:
        torch.div(flat, size, rounding_mode="trunc", out=flat)
    else:
        flat.copy_(flat.double().div_(size).mul_(factor))


def _multiply(flat: torch.Tensor, factor: float) -> None:
    if flat.dtype in _HALVES:
        flat.copy_(flat.float().mul_(factor))
    elif flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))


# The function of each kind of operation; an allreduce and a barrier are handled by Execution --------------------------

_FUNCTIONS: dict[Kind, Callable[[Agreed, Operation, Transport], None]] = {
    Kind.ALLGATHER: all_gather,
    Kind.BROADCAST: broadcast,
    Kind.ALLTOALL: all_to_all,
    Kind.REDUCESCATTER: reduce_scatter,
}
