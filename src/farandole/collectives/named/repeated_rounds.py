"""Remember rounds in which all ranks only repeat requests, and the decisions that follow from them. Pure.

The training step's rounds are of this kind, so they cost next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from farandole.collectives.named.operation_requests import Execute

Repeated: TypeAlias = tuple[tuple[int, ...], ...]
"""For each rank, the places in the cache of the requests that it repeats."""

_MOST = 64


@dataclass(frozen=True)
class RepeatedRound:
    """The decisions of a round, and the places in the cache, in the order of use."""

    decisions: tuple[Execute, ...]
    places: tuple[int, ...]


class RepeatedRounds:
    """Recent rounds that repeat cached requests. They are valid while the cache keeps the same in these places."""

    def __init__(self) -> None:
        self._repeated_rounds: dict[Repeated, RepeatedRound] = {}
        self._places: set[int] = set()

    def get(self, repeated: Repeated) -> RepeatedRound | None:
        return self._repeated_rounds.get(repeated)

    def add(self, repeated: Repeated, plan: RepeatedRound) -> None:
        if len(self._repeated_rounds) >= _MOST:
            self.clear()
        self._repeated_rounds[repeated] = plan
        self._places.update(plan.places)

    def forget_place(self, place: int) -> None:
        """Forget the rounds that use this place: the cache has another operation there now."""
        if place in self._places:
            self.clear()

    def clear(self) -> None:
        self._repeated_rounds.clear()
        self._places.clear()
