"""The cache of matched operations. Pure.

A rank that repeats its request sends only the place of the operation. All ranks put and use the same operations in the
same order, so that a place means the same on all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from farandole.errors import ProtocolError
from farandole.integrations.horovod.named.stages import Key, MatchedOperation, Request


class ResponseCache:
    """The last `capacity` matched operations; the least recently used one is evicted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: dict[Key, int] = {}
        self._matched: list[MatchedOperation] = []
        self._by_age: OrderedDict[int, None] = OrderedDict()

    def at(self, place: int, rank: int) -> MatchedOperation:
        """Return the operation that a rank repeats. Raises ProtocolError for an empty place."""
        if not 0 <= place < len(self._matched):
            raise ProtocolError(f"rank {rank} repeats the request in place {place} of the cache, which is empty")
        return self._matched[place]

    def place_of(self, rank: int, request: Request) -> int | None:
        """Return the place of exactly this request of this rank; None if it is not cached, or was a different one."""
        place = self._places.get(request.key)
        if place is None or self._matched[place].request_of(rank) != request:
            return None
        return place

    def use(self, matched: MatchedOperation) -> int | None:
        """Mark this operation as most recently used. Return a place that now holds another operation, if any."""
        key = matched.key
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
        del self._places[self._matched[place].key]
        return place, place
