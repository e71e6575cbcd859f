"""The process sets of a generation, and their members that have joined. Pure; negotiation.py uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from farandole.collectives.named.operation_requests import GLOBAL_SET, Key


class Members:
    """The members of one process set.

    Attributes:
        ranks: Global, sorted.
        places: The place in the set of each global rank.
        joined: The members that have joined, with their keys, in the order in which they did.
    """

    __slots__ = ("joined", "number", "places", "ranks")

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        self.number, self.ranks = number, ranks
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.joined: dict[int, Key] = {}

    def active(self) -> list[int]:
        """Return the members that have not joined."""
        return [rank for rank in self.ranks if rank not in self.joined]


class ProcessSets:
    """All process sets, by their ids: 0 has all ranks, the others are numbered from 1 in the order of their creation.

    An id is never used for another set, so that two sets cannot be confused.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = GLOBAL_SET + 1
        self._by_number = {GLOBAL_SET: Members(GLOBAL_SET, tuple(range(size)))}

    def __iter__(self) -> Iterator[Members]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Members | None:
        """Return a set; None if it does not exist, or not any more."""
        return self._by_number.get(number)

    def has_existed(self, number: int) -> bool:
        return GLOBAL_SET < number < self._next

    def number_of(self, ranks: tuple[int, ...]) -> int | None:
        """Return the id of the set of these ranks, None if there is none."""
        return next((each.number for each in self if each.ranks == ranks), None)

    def why_impossible(self, ranks: tuple[int, ...]) -> str | None:
        """Return why a new set of these ranks cannot be added; None if it can."""
        if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= self._size:
            return f"a process set has some of the ranks 0 to {self._size - 1}, sorted, each once; got {list(ranks)}"
        number = self.number_of(ranks)
        return None if number is None else f"there is a process set of ranks {list(ranks)} already, with id {number}"

    def add(self, ranks: Iterable[int]) -> Members:
        """Add and return a new set. Raises ValueError for ranks that it cannot have."""
        wanted = tuple(ranks)
        if problem := self.why_impossible(wanted):
            raise ValueError(problem)
        members = Members(self._next, wanted)
        self._by_number[self._next] = members
        self._next += 1
        return members

    def remove(self, number: int) -> None:
        del self._by_number[number]
