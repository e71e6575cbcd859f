"""The rest of an epoch, divided as in Horovod's sampler: the ranks take turns, sample by sample. Pure.

After k batches of b samples on each of W ranks, the first k * b * W samples of the rest are trained, so that one number
describes the progress. sampler.py uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.training.data.intervals import Intervals, difference, first, measure, positions_at
from farandole.training.state.session import TrainedSamples

# The samples at positions of the epoch's order (int64, same shape).
OrderFunction: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]

Positions: TypeAlias = NDArray[np.int64]

# Samples looked up in one call. Few at first, because the first batch waits for them; then more, because a call takes
# as long as about 10,000 samples however few there are.
_FIRST_BLOCK, _LARGEST_BLOCK = 1024, 16_384


@dataclass(frozen=True)
class Remainder:
    """The part of one rank of the rest of an epoch; immutable.

    left     positions that are not trained
    order    function that returns the sample at a position
    carries  samples that the ranks cannot share equally stay for the next epoch, instead of samples being repeated
    """

    left: Intervals
    order: OrderFunction
    rank: int
    world: int
    carries: bool = False

    @property
    def count(self) -> int:
        """Number of samples that are left for all ranks together."""
        return measure(self.left)

    @property
    def per_rank(self) -> int:
        """Number of samples of each rank. If the count is not divisible by the number of ranks, the first world - 1
        or fewer samples of the rest are repeated, so that all ranks make the same number of steps; or as many are
        carried."""
        return self.count // self.world if self.carries else -(-self.count // self.world)

    @property
    def assigned(self) -> int:
        """Number of samples assigned to all ranks together."""
        return min(self.count, self.per_rank * self.world)

    @property
    def carried(self) -> Intervals:
        """Positions of the last samples, which are not assigned: fewer than there are ranks, and none unless this
        carries."""
        return difference(self.left, first(self.left, self.assigned))

    def behind(self, count: int) -> Intervals:
        """Return the trained positions when the ranks together have trained `count` samples."""
        return first(self.left, count)

    def samples(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return this rank's samples number start, ..., stop - 1, as far as they exist."""
        stop = self.per_rank if stop is None else min(stop, self.per_rank)
        if start >= stop:
            return []
        places = (self.rank + self.world * np.arange(start, stop)) % self.count
        samples: list[int] = self.order(positions_at(self.left, places)).tolist()
        return samples

    def trained(self, start: int, stop: int) -> tuple[Positions, Positions, Positions]:
        """Return the positions of this rank's samples number start, ..., stop - 1 <= per_rank: those of this rank,
        those of all ranks together, and those that this rank repeats."""
        everyone = positions_at(self.left, np.arange(start * self.world, min(stop * self.world, self.count)))
        return everyone[self.rank :: self.world], everyone, self.repeats() if stop == self.per_rank else everyone[:0]

    def repeats(self) -> Positions:
        """Return the positions that this rank repeats: at most one, its last one."""
        last = self.rank + self.world * (self.per_rank - 1)
        is_again = self.per_rank and not self.carries and last >= self.count
        return positions_at(self.left, np.array([last % self.count] if is_again else [], dtype=np.int64))

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples, looked up as they are needed."""
        start, block = 0, _FIRST_BLOCK
        while start < self.per_rank:
            yield from self.samples(start, start + block)
            start, block = start + block, min(2 * block, _LARGEST_BLOCK)


# Records of trained samples for the sample ledger: by epoch -----------------------------------------------------------


def parts_by_epoch(
    order: OrderFunction, size: int, epoch: int, ids: Positions, everyone: Positions | None, repeats: Positions
) -> list[TrainedSamples]:
    """Return a Part for each epoch of these positions: those below 0 belong to earlier epochs, and were carried.

    size  samples of an epoch;  ids, everyone, repeats  positions, as in Part
    """
    given = [positions for positions in (ids, everyone, repeats) if positions is not None]
    back = np.unique(np.concatenate(given) // size)

    def of(positions: Positions, epochs: int) -> Positions:
        return order(positions[positions // size == epochs])

    return [
        TrainedSamples(
            epoch + epochs, of(ids, epochs), of(repeats, epochs), None if everyone is None else of(everyone, epochs)
        )
        for epochs in back.tolist()
    ]
