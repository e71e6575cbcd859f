"""Autotune of the bucket size: in the first steps of a job the sizes take turns, then the fastest is kept. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_TURNS = 5
"""Turns of each size, besides the first one, which has cold caches and does not count."""

_WORTHWHILE = 0.97
"""Largest ratio of times at which another size replaces the first one: smaller differences are noise."""


class BucketAutotune:
    """The turns of one generation, equal on all ranks: the next size depends on the number of reductions, not on
    seconds.

    sizes  least bytes of a bucket; the first one is the choice without the autotune
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._times_s: list[list[float]] = [[] for _ in sizes]
        self._reduced = 0

    @property
    def is_over(self) -> bool:
        """True when all sizes have had their turns, except for the last turn, which is the current step."""
        return self._reduced >= len(self.sizes) * (1 + _TURNS)

    @property
    def size(self) -> int:
        """The size whose turn it is."""
        return self.sizes[self._reduced % len(self.sizes)]

    def record(self, seconds: float | None) -> None:
        """Record a reduced step: the time from its first gradient to the last sum; None where it is unknown."""
        turn, place = divmod(self._reduced, len(self.sizes))
        if turn and seconds is not None:
            self._times_s[place].append(seconds)
        self._reduced += 1

    def medians_s(self) -> list[float]:
        """Return the median time of each size on this rank; infinite for a size without times."""
        return [statistics.median(times) if times else math.inf for times in self._times_s]


def fastest(sizes: Sequence[int], medians_s: Sequence[Sequence[float]]) -> int:
    """Return the size to keep. `medians_s`: for each rank, one median for each size; the slowest rank counts."""
    slowest = [max(of_size) for of_size in zip(*medians_s, strict=True)]
    best = min(range(len(sizes)), key=lambda place: slowest[place])
    return sizes[best] if slowest[best] < _WORTHWHILE * slowest[0] else sizes[0]
