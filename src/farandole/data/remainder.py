"""What is left of an epoch, divided as Horovod's sampler does: the ranks take turns, sample by sample. Pure.

Whatever the ranks have trained, after k batches of b samples on each of W ranks the first k * b * W of what was left
are behind them, so that one number says how far they are. sampler.py uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.data.intervals import Intervals, difference, first, measure, positions_at

# The samples at positions of the epoch's order (int64, same shape).
Order: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]

Positions: TypeAlias = NDArray[np.int64]

# Samples looked up in one call: few at first, because the first batch waits for them; then more, because a call
# takes about as long as 10,000 samples however few there are.
_FIRST_BLOCK, _LARGEST_BLOCK = 1024, 16_384


@dataclass(frozen=True)
class Remainder:
    """What one rank gets of it; never changes.

    left     positions that nobody has trained
    order    which sample stands at a position
    carries  what the ranks do not divide stays for the next epoch, instead of samples being taken again
    """

    left: Intervals
    order: Order
    rank: int
    world: int
    carries: bool = False

    @property
    def count(self) -> int:
        """Samples that are left for all ranks together."""
        return measure(self.left)

    @property
    def per_rank(self) -> int:
        """Samples of each rank. Where the ranks do not divide the count, the first world - 1 or fewer of what is
        left are taken again, so that all ranks make the same number of steps; or as many are carried."""
        return self.count // self.world if self.carries else -(-self.count // self.world)

    @property
    def assigned(self) -> int:
        """Number of samples assigned to all ranks together."""
        return min(self.count, self.per_rank * self.world)

    @property
    def carried(self) -> Intervals:
        """The others, the last ones: fewer than there are ranks, and none unless this carries."""
        return difference(self.left, first(self.left, self.assigned))

    def behind(self, count: int) -> Intervals:
        """The positions that are trained when the ranks together have trained `count` samples."""
        return first(self.left, count)

    def samples(self, start: int = 0, stop: int | None = None) -> list[int]:
        """This rank's samples number start, ..., stop - 1, as far as there are so many."""
        stop = self.per_rank if stop is None else min(stop, self.per_rank)
        if start >= stop:
            return []
        places = (self.rank + self.world * np.arange(start, stop)) % self.count
        samples: list[int] = self.order(positions_at(self.left, places)).tolist()
        return samples

    def trained(self, start: int, stop: int) -> tuple[Positions, Positions, Positions]:
        """Positions behind this rank's samples number start, ..., stop - 1 <= per_rank: those of this rank, those of
        all ranks together, and those that this rank has taken again."""
        everyone = positions_at(self.left, np.arange(start * self.world, min(stop * self.world, self.count)))
        return everyone[self.rank :: self.world], everyone, self.repeats() if stop == self.per_rank else everyone[:0]

    def repeats(self) -> Positions:
        """Positions that this rank takes again: one at most, its last one."""
        last = self.rank + self.world * (self.per_rank - 1)
        is_again = self.per_rank and not self.carries and last >= self.count
        return positions_at(self.left, np.array([last % self.count] if is_again else [], dtype=np.int64))

    def __iter__(self) -> Iterator[int]:
        """This rank's samples, looked up as they are needed."""
        start, block = 0, _FIRST_BLOCK
        while start < self.per_rank:
            yield from self.samples(start, start + block)
            start, block = start + block, min(2 * block, _LARGEST_BLOCK)
