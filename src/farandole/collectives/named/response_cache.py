"""Operations that were agreed on before: a rank that repeats its request says only the place of it. Pure.

All ranks put and use the same operations in the same order, so that a place means the same everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from farandole.collectives.named.fusion import Matched
from farandole.collectives.named.operation_requests import Key, Request


class ResponseCache:
    """The last `capacity` operations that were agreed on; the one that was not used for longest makes room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: dict[Key, int] = {}
        self._matched: list[Matched] = []
        self._by_age: OrderedDict[int, None] = OrderedDict()

    def __getitem__(self, place: int) -> Matched:
        """Raises IndexError for a place that holds nothing."""
        if place < 0:
            raise IndexError(place)
        return self._matched[place]

    def place_of(self, rank: int, request: Request) -> int | None:
        """Where exactly this request of this rank is; None if it is not here, or was another one."""
        place = self._places.get(request.key)
        if place is None or self._matched[place].part_of(rank) != request:
            return None
        return place

    def use(self, matched: Matched) -> int | None:
        """Keep this one for longest. Returns a place that now holds something else than before, None for no such."""
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
        """Where these operations are, which must be here."""
        return tuple(self._places[key] for key in keys)

    def touch(self, places: tuple[int, ...]) -> None:
        """Keep the operations in these places for longest."""
        for place in places:
            self._by_age.move_to_end(place)

    def _make_room(self) -> tuple[int, int | None]:
        """A free place, and whether it was taken before."""
        if len(self._matched) < self._capacity:
            return len(self._matched), None
        place, _ = self._by_age.popitem(last=False)
        del self._places[self._matched[place].agreed.key]
        return place, place
