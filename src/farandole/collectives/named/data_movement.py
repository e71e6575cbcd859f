"""Run allgather, broadcast and alltoall on tensors through a transport, as bytes, so that any dtype will do.

execution.py calls it, in the collectives' thread. Shapes are known from the requests of all ranks; they are not
exchanged again.
"""

from __future__ import annotations

import torch

from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Agreed, Request
from farandole.collectives.named.reductions import dtype_named
from farandole.collectives.tensor_bytes import byte_view
from farandole.collectives.transport import Transport

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
