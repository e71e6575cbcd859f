"""Which samples to fetch next: an endless batch sampler that the loader may send elsewhere at any time.

The position to fetch from runs ahead of the cursor as far as the prefetching likes; nothing that is saved or
compared depends on it. A *deal* is what is fetched between two restarts: one place, one world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.data.partition import Layout, batches, delivered, make_ticket
from farandole.state.ticket import Batch

# The samples at the given positions of the given epoch.
Order: TypeAlias = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]

# Positions looked up in one call: few at first, for the next batch after a regroup waits for them; then more and
# more, because a call takes about as long as 10,000 positions however few there are.
_FIRST_BLOCK, _LARGEST_BLOCK = 1024, 16_384


@dataclass(frozen=True)
class Dealt:
    """One batch on its way: `deal` numbers the restart it came from, `indices` are the samples to fetch."""

    deal: int
    batch: Batch
    indices: list[int]


class Dealer:
    """Yields the indices of one batch after the other, over the ends of epochs, for ever.

    deal     number of the current deal
    on_way   what was yielded and not yet taken by the loader, in order
    """

    def __init__(self, layout: Layout, order: Order) -> None:
        self.deal = 0
        self.on_way: deque[Dealt] = deque()
        self._layout, self._order = layout, order
        self._rank, self._world = 0, 1
        self._epoch, self._position = 0, 0
        self._block = _FIRST_BLOCK

    def restart(self, layout: Layout, epoch: int, cursor: int, rank: int, world: int) -> None:
        """Begin a new deal at (epoch, cursor). What is on its way is of an old deal then."""
        self.deal += 1
        self._layout = layout
        self._epoch, self._position = epoch, cursor
        self._rank, self._world = rank, world
        self._block = _FIRST_BLOCK

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            for dealt in self._next_block():
                if dealt.deal != self.deal:
                    break
                self.on_way.append(dealt)
                yield dealt.indices

    def _next_block(self) -> Iterator[Dealt]:
        """Whole tickets with about _block samples for this rank, all of one epoch."""
        layout = self._layout
        if self._position >= layout.size:
            self._epoch, self._position = self._epoch + 1, 0
        block: list[Batch] = []
        ranges: list[tuple[int, int]] = []
        count = 0
        while count < self._block and self._position < layout.size:
            ticket = make_ticket(layout, self._epoch, self._position, self._rank, self._world)
            for batch in batches(ticket, layout.min_share):
                low, high = delivered(batch, layout.min_share)
                block.append(batch)
                ranges.append((low, high))
                count += high - low
            self._position = ticket.stop
        self._block = min(2 * self._block, _LARGEST_BLOCK)
        positions = np.concatenate([np.arange(low, high) for low, high in ranges])
        indices: list[int] = self._order(self._epoch, positions).tolist()
        return _cut(self.deal, block, ranges, indices)


def _cut(deal: int, block: list[Batch], ranges: list[tuple[int, int]], indices: list[int]) -> Iterator[Dealt]:
    end = 0
    for batch, (low, high) in zip(block, ranges, strict=True):
        begin, end = end, end + high - low
        yield Dealt(deal, batch, indices[begin:end])
