"""The execution of the operations that a round has decided: each kind by its function, on tensors, through a
transport."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.integrations.horovod.named import adasum
from farandole.integrations.horovod.named.stages import Kind, MatchedOperation, Request
from farandole.integrations.horovod.named.tensor_queue import Submission
from farandole.training.collectives.connection_pair import as_bytes, byte_view, flat_view
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.shared_memory_transport import SharedMemoryTransport
from farandole.training.collectives.transport import NOTHING, Reduction, Transport
from farandole.training.collectives.transport_choice import host_transport


def execute(
    operations: tuple[MatchedOperation, ...],
    submissions: list[Submission | None],
    transport: Transport,
    buffers: FusionBuffers,
) -> None:
    """Execute one operation, or several allreduces that share a flat buffer, on the transport of their process set.

    Ends each of them with a result, or with an error of this rank alone. Raises the errors of the transport; then some
    operations have not ended.

    `submissions` are this rank's parts, in the same order; None where it contributes zeros because it has joined.
    """
    operation, own = operations[0], submissions[0]
    kind = operation.key.kind
    with torch.no_grad():
        if len(operations) > 1:
            all_reduce_fused(operations, submissions, transport, buffers)
        elif kind is Kind.ALLREDUCE:
            all_reduce(operation, own, transport)
        elif kind is Kind.BARRIER:
            if own is not None:  # a barrier needs no more than the requests of all ranks
                own.finish(None)
        elif own is None:
            raise AssertionError(f"{operation.key} was matched without this rank")
        else:
            _FUNCTIONS[kind](operation, own, transport)


# Allgather, broadcast and alltoall: bytes, so that any dtype will do --------------------------------------------------
#
# Shapes are known from the requests of all ranks; they are not exchanged again.

# Up to this size every rank's bytes, padded to the longest, travel in one exchange; beyond, in one broadcast each. A
# broadcast is a pipeline, so that all of them together keep every link as busy as a ring all-gather would.
_TOGETHER_BYTES = 64 * 1024


def all_gather(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Gather all ranks' rows, in the order of the ranks. The handle also gets the number of rows from each."""
    requests = _all_requests(operation)
    rows = [request.shape[0] for request in requests]
    whole = torch.empty((sum(rows), *requests[0].shape[1:]), dtype=dtype_named(requests[0].dtype), device="cpu")
    _gather_bytes(own.read(), [as_bytes(slot) for slot in torch.split(whole, rows)], transport)
    own.deliver(whole, rows)


def broadcast(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Copy the root's tensor into a new tensor or in place."""
    root = operation.ranks.index(operation.any_request.root)
    if transport.rank == root or (own.in_place and own.stream is None):
        tensor = own.buffer()
    else:
        tensor = torch.empty(own.request.shape, dtype=dtype_named(own.request.dtype), device="cpu")
    transport.broadcast(as_bytes(tensor), root)
    own.deliver(tensor)


def all_to_all(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Receive from each rank the rows that it split off for this one. The handle also gets their number by rank. Every
    rank sees all bytes: a ring passes most of them through every rank anyway."""
    requests, place = _all_requests(operation), transport.rank
    dtype, row_shape = dtype_named(requests[0].dtype), requests[0].shape[1:]
    row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
    received = [request.splits[place] for request in requests]
    whole = torch.empty((sum(received), *row_shape), dtype=dtype, device="cpu")
    sent = [sum(request.splits) for request in requests]
    own_rows = own.read()[: sent[place]]
    if _travels_together([rows * row_bytes for rows in sent]):
        everything = [torch.empty((rows, *row_shape), dtype=dtype, device="cpu") for rows in sent]
        _gather_bytes(own_rows, [as_bytes(each) for each in everything], transport)
        for slot, tensor, request in zip(torch.split(whole, received), everything, requests, strict=True):
            slot.copy_(_cut(tensor, request, place))
    else:
        for source, (slot, request) in enumerate(zip(torch.split(whole, received), requests, strict=True)):
            # One rank's tensor after the other, so that they are never all in memory at once.
            tensor = own_rows if source == place else torch.empty((sent[source], *row_shape), dtype=dtype, device="cpu")
            transport.broadcast(as_bytes(tensor), source)
            slot.copy_(_cut(tensor, request, place))
    own.deliver(whole, received)


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
    for slot, arrived in zip(slots, transport.all_reduce(NOTHING, trailer), strict=True):
        if slot.numel():
            byte_view(slot)[:] = arrived[: slot.numel()]


def _travels_together(lengths: list[int]) -> bool:
    return max(lengths) * len(lengths) <= _TOGETHER_BYTES


def _all_requests(operation: MatchedOperation) -> list[Request]:
    requests = [request for request in operation.requests if request is not None]
    assert len(requests) == len(operation.ranks), f"{operation.key} was matched though a rank had joined"
    return requests


def _cut(tensor: torch.Tensor, request: Request, place: int) -> torch.Tensor:
    """Return the rows of one rank's tensor for the member at `place`."""
    start = sum(request.splits[:place])
    return tensor[start : start + request.splits[place]]


# Allreduce and reducescatter: numbers ---------------------------------------------------------------------------------
#
# In an allreduce, this rank's submission `own` is None when this rank has joined: then it contributes zeros.

_SUMMED = {Reduction.AVERAGE: Reduction.SUM}
_AVERAGING = (RingTransport, SharedMemoryTransport)
"""They divide each part of the sum while it is in the cache."""
_WIDE = (torch.float32, torch.float64)
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


def all_reduce(operation: MatchedOperation, own: Submission | None, transport: Transport) -> None:
    """Reduce one tensor in its own memory or in a copy of it."""
    request = operation.any_request
    tensor = torch.zeros(request.shape, dtype=dtype_named(request.dtype), device="cpu") if own is None else own.buffer()
    _reduce(_numbers(tensor), request, transport)
    if own is not None:
        own.deliver(tensor)


def all_reduce_fused(
    operations: tuple[MatchedOperation, ...],
    submissions: list[Submission | None],
    transport: Transport,
    buffers: FusionBuffers,
) -> None:
    """Reduce several tensors of one dtype, op and scale by one reduction of a flat buffer."""
    requests = [operation.any_request for operation in operations]
    sizes = [torch.Size(request.shape).numel() for request in requests]
    dtype = dtype_named(requests[0].dtype)
    flat = buffers.take(dtype, sum(sizes))
    slots = torch.split(flat, sizes)
    for slot, own in zip(slots, submissions, strict=True):
        if own is None:
            slot.zero_()
        else:
            slot.copy_(own.read().view(-1))
    _reduce(_numbers(flat), requests[0], transport)
    for slot, request, own in zip(slots, requests, submissions, strict=True):
        if own is not None:
            # Out of place and on the CPU the slot itself must not be returned: it is used again.
            result = slot.view(request.shape)
            own.deliver(result if own.in_place or own.stream is not None else result.clone())


def reduce_scatter(operation: MatchedOperation, own: Submission, transport: Transport) -> None:
    """Reduce the whole tensor, and keep this rank's rows: the first ranks get one more if they divide unevenly."""
    tensor = own.buffer()
    _reduce(_numbers(tensor), operation.any_request, transport)
    start, stop = rows_of(transport.rank, tensor.shape[0], transport.size)
    own.deliver(tensor[start:stop].clone())


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


def _reduce(flat: torch.Tensor, request: Request, transport: Transport) -> None:
    """Reduce a flat tensor in place as all ranks have requested."""
    op = Reduction(request.op)
    if request.dtype == "bool":
        transport.all_reduce(flat, op=_LOGICAL.get(op, op))
        return
    prescale(flat, request.prescale)
    if op is Reduction.ADASUM:
        adasum.reduce(flat, transport)
    elif op is Reduction.AVERAGE and flat.dtype in _WIDE and isinstance(host_transport(transport), _AVERAGING):
        transport.all_reduce(flat, op=op)
        prescale(flat, request.postscale)
        return
    elif transport.size > 1:
        transport.all_reduce(flat, op=_SUMMED.get(op, op))
    postscale(flat, op, transport.size, request.postscale)


# Scaling of numbers before and after they are summed, in place, by Horovod's rules for each dtype ---------------------

_HALVES = (torch.float16, torch.bfloat16)


def prescale(flat: torch.Tensor, factor: float) -> None:
    """Multiply every element. Integers are multiplied in float64 and truncated toward zero, halves in float32."""
    if factor == 1.0:
        return
    if flat.dtype in _HALVES:
        flat.copy_(flat.float().mul_(factor))
    elif flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))


def postscale(flat: torch.Tensor, op: Reduction, size: int, factor: float) -> None:
    """Turn the sum over `size` ranks into the requested result: divide it for an AVERAGE, then multiply it. Integers
    are truncated toward zero, once."""
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


# The function of each kind of operation; execute() handles an allreduce and a barrier ---------------------------------

_FUNCTIONS: dict[Kind, Callable[[MatchedOperation, Submission, Transport], None]] = {
    Kind.ALLGATHER: all_gather,
    Kind.BROADCAST: broadcast,
    Kind.ALLTOALL: all_to_all,
    Kind.REDUCESCATTER: reduce_scatter,
}
