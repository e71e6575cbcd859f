"""Fuse operations: allreduces of one kind share a flat buffer up to a size. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from farandole.collectives.named.operation_requests import Agreed, Execute, Kind, Request
from farandole.collectives.named.process_set_members import Members
from farandole.collectives.reduction import Reduction

Likeness: TypeAlias = tuple[object, ...]

# Only for comparing a buffer with its limit; an estimate is good enough for a dtype that is not listed.
_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "complex128": 16,
}
_OTHER_ITEM_BYTES = 8


class Matched:
    """An operation whose requests agree on all members, with the data needed to execute it again.

    Attributes:
        likeness: Operations with equal values may share a buffer; None for one that is always alone.
        nbytes: The size of one rank's tensor.
    """

    __slots__ = ("agreed", "execute", "likeness", "members", "nbytes")

    def __init__(self, members: Members, agreed: Agreed) -> None:
        self.members, self.agreed = members, agreed
        part = agreed.any_part
        self.nbytes = math.prod(part.shape) * _ITEM_BYTES.get(part.dtype, _OTHER_ITEM_BYTES)
        self.likeness = _likeness(agreed, part)
        self.execute = Execute((agreed,))

    def part_of(self, rank: int) -> Request | None:
        """Return the request of a global rank; None if it is not a member, or had joined."""
        place = self.members.places.get(rank)
        return None if place is None else self.agreed.parts[place]


def fuse(matched: Iterable[Matched], fusion_bytes: float) -> list[Execute]:
    """Return each operation once, in the order of the first of each buffer."""
    buffers: list[list[Matched]] = []
    last: dict[Likeness, tuple[list[Matched], float]] = {}
    for each in matched:
        likeness, nbytes = each.likeness, each.nbytes
        if likeness is not None and (open_one := last.get(likeness)) and open_one[1] + nbytes <= fusion_bytes:
            buffer, held = open_one
            buffer.append(each)
        else:
            buffer, held = [each], 0
            buffers.append(buffer)
        if likeness is not None:
            last[likeness] = buffer, held + nbytes
    return [
        buffer[0].execute if len(buffer) == 1 else Execute(tuple(each.agreed for each in buffer)) for buffer in buffers
    ]


def _likeness(agreed: Agreed, part: Request) -> Likeness | None:
    if agreed.key.kind is not Kind.ALLREDUCE or part.op == Reduction.ADASUM:
        return None
    # For each rank, as a rank may have one tensor on its first device and another one on its second.
    devices = tuple(None if each is None else each.device for each in agreed.parts)
    return agreed.key.process_set, part.dtype, part.op, part.prescale, part.postscale, devices
