"""The samples that a rank fetches next: a batch sampler that its loader may move to another position at any time.

The position to fetch from runs ahead of the cursor as far as the prefetching needs, but not beyond the epoch: code
between two epochs may change the data set. Nothing that is saved or compared depends on it. Between two restarts,
position and world are fixed; `restart_id` numbers them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from farandole.training.data.partition import BatchLayout, batches, delivered, make_global_batch
from farandole.training.data.sample_order import Lookup
from farandole.training.state.batch import Batch, GlobalBatch

if TYPE_CHECKING:
    from farandole.training.data.balance import Turns
    from farandole.training.data.division_by_speed import Counts


# Positions looked up in one call. Few at first, because the next batch after a regroup waits for them; then more and
# more, because a call takes as long as about 10,000 positions however few there are.
_FIRST_BLOCK, _LARGEST_BLOCK = 1024, 32_768


class IndexedBatch(msgspec.Struct, frozen=True):
    """A batch that is being fetched: `restart_id` numbers the restart it belongs to, `indices` are the samples to
    fetch."""

    restart_id: int
    batch: Batch
    indices: list[int]


class IndexStream:
    """Yields the indices of one batch after the other, to the end of the epoch.

    Each iteration begins with the batches on the way, so that new loader processes fetch what lost ones
    did not deliver.

    restart_id  number of the last restart
    on_way      batches that were yielded and not yet taken by the loader, in order
    is_through  the last iteration has come to its end; a restart needs another one then
    """

    def __init__(self, layout: BatchLayout, order: Lookup, turns: Turns | None = None) -> None:
        """`turns`: the division of each global batch, where local batches follow the speed of the workers."""
        self.restart_id = 0
        self.on_way: deque[IndexedBatch] = deque()
        self.is_through = False
        self._layout, self._order, self._turns = layout, order, turns
        self._turns_at: tuple[int, int] | None = None  # a block that reaches this place may be divided as before
        self._rank, self._world = 0, 1
        self._epoch, self._position = 0, 0
        self._block = _FIRST_BLOCK
        self._looked_up: Iterator[IndexedBatch] = iter(())  # the rest of the block
        self._is_trial = False

    def try_out(self) -> None:
        """Yield one sample at a time until restart(), which is enough for the loader workers to initialize."""
        self._is_trial = True

    def restart(self, layout: BatchLayout, epoch: int, cursor: int, rank: int, world: int) -> None:
        """Continue at (epoch, cursor). Batches being fetched belong to an earlier restart from now on."""
        self.restart_id += 1
        self._layout = layout
        self._epoch, self._position = epoch, cursor
        self._rank, self._world = rank, world
        self._block, self._looked_up = _FIRST_BLOCK, iter(())
        self._is_trial = False
        self.turn()

    def turn(self) -> None:
        """Divide global batches from `turns.at` on as `turns` says now. None of them was yielded yet."""
        self._turns_at = self._turns.at if self._turns is not None else None

    def __iter__(self) -> Iterator[list[int]]:
        return (indexed.indices for indexed in self.requests())

    def requests(self) -> Iterator[IndexedBatch]:
        """Yield the batches whose indices an iteration yields."""
        self.is_through = False
        yield from tuple(self.on_way)
        while (indexed := self._next_batch()) is not None:
            self.on_way.append(indexed)
            yield indexed
        self.is_through = True

    def _next_batch(self) -> IndexedBatch | None:
        """Return the next batch; None at the end of the epoch."""
        while True:
            indexed = next(self._looked_up, None)
            if indexed is None:
                if self._position >= self._layout.end:
                    return None
                self._looked_up = self._next_block()
                continue
            global_batch = indexed.batch.global_batch
            if self._turns_at is not None and (global_batch.epoch, global_batch.start) >= self._turns_at:
                self._position, self._turns_at, self._looked_up = global_batch.start, None, iter(())
                continue
            return msgspec.structs.replace(indexed, indices=indexed.indices[:1]) if self._is_trial else indexed

    def _next_block(self) -> Iterator[IndexedBatch]:
        """Yield whole global batches with about _block samples for this rank."""
        layout = self._layout
        epoch, begin = self._epoch, self._position
        counts = self._counts_at(epoch, begin)
        smallest, largest = layout.global_batch_size // self._world, -(-layout.global_batch_size // self._world)
        if counts and not layout.shards:
            smallest, largest = min(counts), max(counts)
        count = max(1, self._block // largest)
        self._block = min(2 * self._block, _LARGEST_BLOCK)
        alike = 0 if layout.listed is not None else min(count, (layout.end - begin) // layout.global_batch_size)
        if (
            alike
            and not layout.shards
            and layout.min_local_batch <= smallest
            and largest <= (layout.max_local_batch or largest)
        ):
            self._position = begin + alike * layout.global_batch_size
            return self._full_batches(epoch, begin, alike, counts)
        block: list[Batch] = []
        while len(block) < count and self._position < layout.end:
            global_batch = make_global_batch(layout, epoch, self._position, self._rank, self._world, counts)
            block += batches(global_batch, layout.min_local_batch)
            self._position = global_batch.stop
        return self._any_batches(epoch, block)

    def _counts_at(self, epoch: int, start: int) -> Counts:
        """Return the division of the global batch at this place; empty: even. A rehearsal may be of another world."""
        counts = self._turns.of(epoch, start) if self._turns is not None else ()
        return counts if len(counts) == self._world else ()

    def _full_batches(self, epoch: int, begin: int, count: int, counts: Counts) -> Iterator[IndexedBatch]:
        """Yield as _any_batches does, for global batches of which each rank has one micro-batch: nearly all. Their
        local batches are equally long and equally far apart, so that only the global batches are created one by one."""
        restart_id, size, micro_batches = self.restart_id, self._layout.global_batch_size, 1
        first = make_global_batch(self._layout, epoch, begin, self._rank, self._world, counts)
        low, high = first.low - begin, first.high - begin
        starts = np.arange(begin, begin + count * size, size)
        positions = (starts[:, None] + np.arange(low, high)).ravel()
        rows = self._look_up(epoch, positions).reshape(count, high - low)
        for start, row in zip(starts.tolist(), rows, strict=True):
            global_batch = GlobalBatch(epoch, start, start + size, start + low, start + high, micro_batches)
            yield IndexedBatch(restart_id, Batch(global_batch, start + low, start + high), row.tolist())

    def _any_batches(self, epoch: int, block: list[Batch]) -> Iterator[IndexedBatch]:
        ranges = [delivered(batch, self._layout.min_local_batch) for batch in block]
        positions = np.concatenate([np.arange(low, high) for low, high in ranges])
        indices: list[int] = self._look_up(epoch, positions).tolist()
        restart_id, end = self.restart_id, 0
        for batch, (low, high) in zip(block, ranges, strict=True):
            begin, end = end, end + high - low
            yield IndexedBatch(restart_id, batch, indices[begin:end])

    def _look_up(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._layout.tail != "carry":
            return self._order(epoch, positions)
        size = self._layout.size
        beyond = positions >= size  # in the next epoch: a global batch across the border
        samples = np.empty_like(positions)
        samples[~beyond] = self._order(epoch, positions[~beyond])
        samples[beyond] = self._order(epoch + 1, positions[beyond] - size)
        return samples
