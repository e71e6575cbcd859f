"""The positions on which a rank trains: its part of a global batch, and the micro-batches of it. Pure.

Nothing here is stored: every division depends on the cursor and the world, so that a change of the world divides the
remaining samples again and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from farandole.errors import DataError
from farandole.training.state.batch import Batch, GlobalBatch

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division
    from farandole.training.data.listed_batches import ListedBatches
    from farandole.training.state.shard_audit import AuditRule


# The use of the last samples of an epoch, when the global batch size does not divide it.
Tail: TypeAlias = Literal["short", "carry", "drop"]


@dataclass(frozen=True)
class Sizes:
    """The sizes by which the global batches of streams are divided, as in BatchLayout. Raises DataError on invalid
    values."""

    global_batch_size: int
    max_local_batch: int | None
    min_local_batch: int

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise DataError(f"global_batch_size must be 1 or more, got {self.global_batch_size}")
        _check_local_batches(self)


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
    shards             in strict mode, parts of a global batch, each of which is one loop body on some rank, whatever
                       the world; 0: not strict. Then max_local_batch has no effect here
    audit              in strict mode, the rule by which shards are computed again; None: none are
    is_balanced        local batches follow the speed of the workers. Then a rank has no dummy batches beside others: it
                       has as many micro-batches as its samples need
    listed             the batches of the epoch as samplers of torch have listed them: they make the global batches, of
                       which global_batch_size is the largest; None: all global batches but the last one are alike

    Raises DataError on invalid values.
    """

    size: int
    global_batch_size: int
    max_local_batch: int | None = None
    min_local_batch: int = 1
    tail: Tail = "short"
    shards: int = 0
    audit: AuditRule | None = None
    is_balanced: bool = False
    listed: ListedBatches | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("the data set is empty: it must have at least 1 sample")
        if not (isinstance(self.global_batch_size, int) and 1 <= self.global_batch_size <= self.size):
            raise DataError(
                f"global_batch_size must be in 1..{self.size}, the size of the data set, and a whole number; got "
                f"{self.global_batch_size}"
            )
        if self.tail not in get_args(Tail):
            raise DataError(f"tail must be one of {', '.join(get_args(Tail))}, got {self.tail!r}")
        _check_local_batches(self)

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
        if self.listed is not None:
            return self.listed.steps_from(0)
        begin = cursor % self.global_batch_size if self.tail == "carry" else 0
        return -(-(self.end - begin) // self.global_batch_size)

    def steps_left(self, cursor: int, epochs: int = 0) -> int:
        """Return the number of optimizer steps from the cursor to the end of its epoch, and of further whole epochs."""
        if self.listed is not None:
            return self.listed.steps_from(cursor) + epochs * self.global_batches()
        if self.tail == "carry":
            return max(0, -(-(self.size * (1 + epochs) - cursor) // self.global_batch_size))
        return max(0, -(-(self.end - cursor) // self.global_batch_size)) + epochs * self.global_batches()

    def next_epoch(self, cursor: int) -> int:
        """Return the cursor at which the next epoch begins, when this one is left at `cursor`."""
        return max(0, cursor - self.size)


def _check_local_batches(sizes: Sizes | BatchLayout) -> None:
    count, most, least = sizes.global_batch_size, sizes.max_local_batch, sizes.min_local_batch
    if not 1 <= least <= count:
        raise DataError(f"min_local_batch must be in 1..{count}, the global batch size, got {least}")
    # With a smaller limit, some local batch could not be split into parts between min_local_batch and max_local_batch.
    if most is not None and most < 2 * least - 1:
        raise DataError(f"max_local_batch must be at least 2 * min_local_batch - 1 = {2 * least - 1}, got {most}")


def make_global_batch(
    layout: BatchLayout, epoch: int, cursor: int, rank: int, world: int, counts: Sequence[int] = ()
) -> GlobalBatch:
    """Return the global batch at `cursor`, as rank `rank` of `world` gets it. `counts`: the samples, in strict mode
    shards, of each rank of this world in a whole global batch; empty: equally many for all."""
    start, stop = global_batch_range(layout, cursor)
    if layout.shards:
        return _sharded_global_batch(layout, epoch, start, stop, rank, world, counts)
    if layout.listed is not None and world == layout.listed.workers and not counts:
        return _listed_global_batch(layout.listed, epoch, start, stop, rank)
    parts = uneven_slices(start, stop, counts, layout.min_local_batch) if counts else []
    low, high = parts[rank] if parts else even_slice(start, stop, rank, world, layout.min_local_batch)
    if layout.is_balanced and layout.max_local_batch is not None:
        bodies = max(1, -(-(high - low) // layout.max_local_batch))
        return GlobalBatch(epoch, start, stop, low, high, bodies, has_own_bodies=True)
    if layout.listed is not None:  # the script counts its loop bodies, and steps after as many as at the start
        count = len(layout.listed.batches_of(start))
        return GlobalBatch(epoch, start, stop, low, high, count, added=count)
    count = micro_batches(start, stop, world, layout.max_local_batch, layout.min_local_batch)
    return GlobalBatch(epoch, start, stop, low, high, count)


def _listed_global_batch(listed: ListedBatches, epoch: int, start: int, stop: int, rank: int) -> GlobalBatch:
    """Return a global batch as one of the workers of the start gets it: with the batches of its own sampler."""
    low, high = even_slice(start, stop, rank, listed.workers)
    sizes = listed.batches_of(start)
    cuts = tuple(itertools.accumulate(sizes, initial=low))
    return GlobalBatch(epoch, start, stop, low, high, len(sizes), added=len(sizes), cuts=cuts)


def batches(global_batch: GlobalBatch, min_local_batch: int = 1) -> list[Batch]:
    """Return the micro-batches of a global batch, as many on every rank; one without a sample is a dummy batch."""
    count = global_batch.micro_batches
    if global_batch.division is not None:
        return [_shard(global_batch, global_batch.division, index, min_local_batch) for index in range(count)]
    if global_batch.cuts:
        parts = itertools.pairwise(global_batch.cuts)
        return [Batch(global_batch, low, high, index) for index, (low, high) in enumerate(parts)]
    return [
        Batch(global_batch, *even_slice(global_batch.low, global_batch.high, index, count, min_local_batch), index)
        for index in range(count)
    ]


def _sharded_global_batch(
    layout: BatchLayout, epoch: int, start: int, stop: int, rank: int, world: int, counts: Sequence[int]
) -> GlobalBatch:
    """Return a global batch of strict mode: a rank's local batch are the samples of its shards."""
    from farandole.training.collectives.shard_tree import divide  # loaded only in strict mode

    division = divide(layout.shards, tuple(counts) or (1,) * world)
    first, behind = division.ranges[rank]
    low, high = (even_slice(start, stop, shard, layout.shards, layout.min_local_batch)[0] for shard in (first, behind))
    audit = None if layout.audit is None else layout.audit.draw(division, epoch, start)
    bodies = (max(1, behind - first) if layout.is_balanced else division.most) + (audit is not None)
    samples = stop - start
    are_equal = not samples % layout.shards and samples // layout.shards >= layout.min_local_batch
    return GlobalBatch(epoch, start, stop, low, high, bodies, division, rank, audit, layout.is_balanced, are_equal)


def _shard(global_batch: GlobalBatch, division: Division, index: int, min_local_batch: int) -> Batch:
    """Return the rank's shard with this index; a dummy batch where other ranks have more shards. In an audit the first
    one is another rank's."""
    (first, stop), audit = division.ranges[global_batch.place], global_batch.audit
    is_audit = audit is not None and index == 0
    if audit is None:
        shard = first + index
    else:
        shard = audit.again(global_batch.place) if is_audit else first + index - 1
    if shard < 0 or (shard >= stop and not is_audit):
        return Batch(global_batch, global_batch.high, global_batch.high, index, is_audit=is_audit)
    low, high = even_slice(global_batch.start, global_batch.stop, shard, division.shards, min_local_batch)
    return Batch(global_batch, low, high, index, shard, is_audit)


def global_batch_range(layout: BatchLayout, cursor: int) -> tuple[int, int]:
    """Return positions [start, stop) of the global batch at `cursor`."""
    if layout.listed is not None:
        return cursor, layout.listed.stop(cursor)
    stop = cursor + layout.global_batch_size
    return cursor, stop if layout.tail == "carry" else min(stop, layout.end)


def next_global_batch(layout: BatchLayout, epoch: int, cursor: int) -> tuple[int, int]:
    """Return epoch and first position of the global batch behind the one at (epoch, cursor), where the cursor may be at
    the end of the epoch."""
    while cursor >= layout.end:
        epoch, cursor = epoch + 1, layout.next_epoch(cursor)
    return epoch, global_batch_range(layout, cursor)[1]


def even_slice(start: int, stop: int, part: int, parts: int, min_local_batch: int = 1) -> tuple[int, int]:
    """Return positions [low, high) of one part of [start, stop), which is divided as evenly as possible. It divides a
    global batch among ranks, and a rank's local batch into micro-batches.

    With min_local_batch > 1, only as many parts receive samples as can have min_local_batch of them, but at least one.
    """
    samples = stop - start
    active = _active(samples, parts, min_local_batch)
    low, high = min(part, active), min(part + 1, active)
    return start + low * samples // active, start + high * samples // active


def uneven_slices(start: int, stop: int, counts: Sequence[int], min_local_batch: int = 1) -> list[tuple[int, int]]:
    """Return positions [low, high) of each part of [start, stop), which is divided in proportion to `counts`. Empty: a
    part would have samples, and fewer than min_local_batch."""
    samples, whole = stop - start, sum(counts)
    bounds = [start + samples * before // whole for before in itertools.accumulate(counts, initial=0)]
    parts = list(itertools.pairwise(bounds))
    return [] if any(0 < high - low < min_local_batch for low, high in parts) else parts


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
    global batch, or as many as a shard has, which do not count."""
    if batch.samples:
        return batch.low, batch.high
    global_batch = batch.global_batch
    if global_batch.division is not None:
        min_local_batch = max(min_local_batch, -(-global_batch.global_samples // global_batch.division.shards))
    return max(global_batch.start, global_batch.stop - min_local_batch), global_batch.stop


def _active(samples: int, parts: int, min_local_batch: int) -> int:
    return parts if min_local_batch == 1 else max(1, min(parts, samples // min_local_batch))
