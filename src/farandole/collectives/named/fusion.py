"""Operations that all ranks agree on: fused, so that allreduces of one kind share a flat buffer, and cached. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from farandole.collectives.named.operation_requests import Agreed, Execute, Key, Kind, Request
from farandole.collectives.named.process_set_members import Members
from farandole.collectives.transport import Reduction

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


# The cache of agreed operations ---------------------------------------------------------------------------------------
#
# A rank that repeats its request sends only the place of the operation. All ranks put and use the same operations in
# the same order, so that a place means the same everywhere.


class ResponseCache:
    """The last `capacity` agreed operations; the least recently used one is evicted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: dict[Key, int] = {}
        self._matched: list[Matched] = []
        self._by_age: OrderedDict[int, None] = OrderedDict()

    def __getitem__(self, place: int) -> Matched:
        """Return the operation in a place. Raises IndexError for an empty place."""
        if place < 0:
            raise IndexError(place)
        return self._matched[place]

    def place_of(self, rank: int, request: Request) -> int | None:
        """Return the place of exactly this request of this rank; None if it is not cached, or was a different one."""
        place = self._places.get(request.key)
        if place is None or self._matched[place].part_of(rank) != request:
            return None
        return place

    def use(self, matched: Matched) -> int | None:
        """Mark this operation as most recently used. Return a place that now holds another operation, if any."""
        key = matched.agreed.key
        place = self._places.get(key)
        changed = None
        if place is None:
            if not self._capacity:
                return None
            place, changed = self._make_room()
            self._places[key] = place
            self._matched[place : place + 1] = [matched]
        elif self._matched[place] is not matched:
            self._matched[place] = matched
            changed = place
        self._by_age[place] = None
        self._by_age.move_to_end(place)
        return changed

    def places(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """Return the places of these operations, which must be cached."""
        return tuple(self._places[key] for key in keys)

    def touch(self, places: tuple[int, ...]) -> None:
        """Mark the operations in these places as most recently used."""
        for place in places:
            self._by_age.move_to_end(place)

    def _make_room(self) -> tuple[int, int | None]:
        """Return a free place, and the place that was evicted for it, if any."""
        if len(self._matched) < self._capacity:
            return len(self._matched), None
        place, _ = self._by_age.popitem(last=False)
        del self._places[self._matched[place].agreed.key]
        return place, place
