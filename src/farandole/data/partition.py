"""The positions of the global order on which a rank trains. Pure; the index stream and the tests of the order use it.

Nothing here is stored: every division depends on the cursor and the world, so that a change of the world divides the
remaining samples again and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from farandole.errors import DataError
from farandole.state.global_batch import Batch, GlobalBatch

# The use of the last samples of an epoch, when the global batch size does not divide it.
Tail: TypeAlias = Literal["short", "carry", "drop"]


@dataclass(frozen=True)
class BatchLayout:
    """The partition of an epoch into global batches, and of these into loop bodies; equal on all ranks.

    size               samples of one epoch: positions 0, ..., size - 1 of its order
    global_batch_size  samples of one optimizer step, over all ranks
    max_local_batch    most samples of one loop body; larger local batches are split into micro-batches; None: all
    min_local_batch    fewest samples of one loop body, where there are so many (2 for BatchNorm)
    tail               use of the samples that do not fill the last global batch of an epoch
        "short"  they form a shorter one
        "carry"  it is filled with the first samples of the next epoch: positions from `size` on stand for them. The
                 step belongs to the epoch in which it began, and the cursor moves beyond `size` by the samples that
                 the next epoch has had already
        "drop"   they are not trained in this epoch; the next one has another order, and so drops others

    Raises DataError on invalid values.
    """

    size: int
    global_batch_size: int
    max_local_batch: int | None = None
    min_local_batch: int = 1
    tail: Tail = "short"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("the data set is empty: it must have at least 1 sample")
        if not (isinstance(self.global_batch_size, int) and 1 <= self.global_batch_size <= self.size):
            raise DataError(
                f"global_batch_size must be in 1..{self.size}, the size of the data set, and a whole number; got "
                f"{self.global_batch_size}"
            )
        if not 1 <= self.min_local_batch <= self.global_batch_size:
            raise DataError(
                f"min_local_batch must be in 1..{self.global_batch_size}, the global batch size, got "
                f"{self.min_local_batch}"
            )
        if self.tail not in get_args(Tail):
            raise DataError(f"tail must be one of {', '.join(get_args(Tail))}, got {self.tail!r}")
        # With a smaller limit, some local batch could not be split into parts between min_local_batch and
        # max_local_batch.
        if self.max_local_batch is not None and self.max_local_batch < 2 * self.min_local_batch - 1:
            raise DataError(
                f"max_local_batch must be at least 2 * min_local_batch - 1 = {2 * self.min_local_batch - 1}, "
                f"got {self.max_local_batch}"
            )

    @property
    def end(self) -> int:
        """Cursor at which the epoch is over, as it is beyond."""
        return self.size - self.size % self.global_batch_size if self.tail == "drop" else self.size

    @property
    def cursors_end(self) -> int:
        """Upper limit of the cursors; all are below it."""
        return self.end + (self.global_batch_size if self.tail == "carry" else 1)

    def global_batches(self, cursor: int = 0) -> int:
        """Return the number of global batches, and so of optimizer steps, of the whole epoch with this cursor. It is
        equal in each epoch, except with "carry", where the epoch begins at the cursor that the previous one has left.
        """
        begin = cursor % self.global_batch_size if self.tail == "carry" else 0
        return -(-(self.end - begin) // self.global_batch_size)

    def steps_left(self, cursor: int, epochs: int = 0) -> int:
        """Return the number of optimizer steps from the cursor to the end of its epoch, and of further whole epochs."""
        if self.tail == "carry":
            return max(0, -(-(self.size * (1 + epochs) - cursor) // self.global_batch_size))
        return max(0, -(-(self.end - cursor) // self.global_batch_size)) + epochs * self.global_batches()

    def next_epoch(self, cursor: int) -> int:
        """Return the cursor at which the next epoch begins, when this one is left at `cursor`."""
        return max(0, cursor - self.size)


def make_global_batch(layout: BatchLayout, epoch: int, cursor: int, rank: int, world: int) -> GlobalBatch:
    """Return the global batch at `cursor`, as rank `rank` of `world` gets it."""
    start, stop = global_batch_range(layout, cursor)
    low, high = even_slice(start, stop, rank, world, layout.min_local_batch)
    count = micro_batches(start, stop, world, layout.max_local_batch, layout.min_local_batch)
    return GlobalBatch(epoch, start, stop, low, high, count)


def batches(global_batch: GlobalBatch, min_local_batch: int = 1) -> list[Batch]:
    """Return the micro-batches of a global batch, as many on every rank; one without a sample is a dummy batch."""
    count = global_batch.micro_batches
    return [
        Batch(global_batch, *even_slice(global_batch.low, global_batch.high, index, count, min_local_batch), index)
        for index in range(count)
    ]


def global_batch_range(layout: BatchLayout, cursor: int) -> tuple[int, int]:
    """Return positions [start, stop) of the global batch at `cursor`."""
    stop = cursor + layout.global_batch_size
    return cursor, stop if layout.tail == "carry" else min(stop, layout.end)


def even_slice(start: int, stop: int, part: int, parts: int, min_local_batch: int = 1) -> tuple[int, int]:
    """Return positions [low, high) of one part of [start, stop), which is divided as evenly as possible. It divides a
    global batch among ranks, and a rank's local batch into micro-batches.

    With min_local_batch > 1, only as many parts receive samples as can have min_local_batch of them, but at least one.
    """
    samples = stop - start
    active = _active(samples, parts, min_local_batch)
    low, high = min(part, active), min(part + 1, active)
    return start + low * samples // active, start + high * samples // active


def micro_batches(start: int, stop: int, world: int, max_local_batch: int | None, min_local_batch: int = 1) -> int:
    """Return the number of micro-batches of the global batch [start, stop): from the largest local batch, so that all
    ranks agree."""
    if max_local_batch is None:
        return 1
    samples = stop - start
    largest = -(-samples // _active(samples, world, min_local_batch))
    return -(-largest // max_local_batch)


def delivered(batch: Batch, min_local_batch: int = 1) -> tuple[int, int]:
    """Return positions of the samples in the tensors: the batch's own; for a dummy batch, min_local_batch others of its
    global batch, which do not count."""
    if not batch.is_dummy:
        return batch.low, batch.high
    global_batch = batch.global_batch
    return max(global_batch.start, global_batch.stop - min_local_batch), global_batch.stop


def _active(samples: int, parts: int, min_local_batch: int) -> int:
    return parts if min_local_batch == 1 else max(1, min(parts, samples // min_local_batch))
