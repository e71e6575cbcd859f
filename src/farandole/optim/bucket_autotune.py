"""Which size of buckets is fastest: in the first steps of a job they take turns, then one is kept. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_TURNS = 5
"""Of each size, beside the first one, which meets cold caches and is not counted."""

_WORTHWHILE = 0.97
"""Another size than the first one is taken when it needs less than this part of its time: the rest is noise."""


class BucketAutotune:
    """The turns of one generation, the same on all ranks: who asks what comes next counts reductions, not seconds.

    sizes  least bytes of a bucket; the first one is what would be chosen without the autotune
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._times_s: list[list[float]] = [[] for _ in sizes]
        self._reduced = 0

    @property
    def is_over(self) -> bool:
        """Whether all have had their turns, but for the last one, which is in the step that asks."""
        return self._reduced >= len(self.sizes) * (1 + _TURNS)

    @property
    def size(self) -> int:
        """Whose turn it is."""
        return self.sizes[self._reduced % len(self.sizes)]

    def record(self, seconds: float | None) -> None:
        """A step was reduced: from its first gradient to the last sum; None where that is not known."""
        turn, place = divmod(self._reduced, len(self.sizes))
        if turn and seconds is not None:
            self._times_s[place].append(seconds)
        self._reduced += 1

    def medians_s(self) -> list[float]:
        """Of each size on this rank; infinite where nothing is known."""
        return [statistics.median(times) if times else math.inf for times in self._times_s]


def fastest(sizes: Sequence[int], medians_s: Sequence[Sequence[float]]) -> int:
    """The size to keep. `medians_s`: of each rank, one for each size; the slowest rank counts."""
    slowest = [max(of_size) for of_size in zip(*medians_s, strict=True)]
    best = min(range(len(sizes)), key=lambda place: slowest[place])
    return sizes[best] if slowest[best] < _WORTHWHILE * slowest[0] else sizes[0]
