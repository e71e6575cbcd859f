"""The order of samples, from an epoch to the batch of a rank. Pure.

order          the sequence of an epoch's samples: Shuffled, the default, or Sequential (grouped_order.py has others)
permutation    a pseudo-random order with random access, for Shuffled
partition      the positions of that sequence on which a rank trains, for any world
index stream   the samples that a loader fetches next
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.errors import DataError
from farandole.training.state.step import Batch, GlobalBatch

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division
    from farandole.training.data.balance import Turns
    from farandole.training.data.division_by_speed import Counts
    from farandole.training.data.listed_batches import ListedBatches
    from farandole.training.state.shard_audit import AuditRule

# lookup(epoch, positions): the samples at these positions of the epoch's order (int64, one dimension).
Lookup: TypeAlias = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


class Order(Protocol):
    """A mapping from positions to samples, with random access: only a cursor has to be saved.

    It holds the user's choice and no position; it is equal on all ranks.
    """

    @property
    def identity(self) -> str:
        """Short text that differs where a cursor would mean other samples; a part of the saved state."""
        ...

    def length(self, samples: int) -> int:
        """Return the number of positions of an epoch, for a data set of this size. Raises DataError when the order does
        not fit."""
        ...

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        """Return the lookup function for a loader. It depends on (order, layout, seed) only. May take time and memory
        in proportion to the order's arguments. Raises DataError for an unsuitable layout."""
        ...


def fingerprint(*arrays: NDArray[np.int64] | NDArray[np.float64]) -> str:
    """Return eight hexadecimal digits that tell these values from others, equal on every machine."""
    digest = hashlib.blake2b(digest_size=4)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def whole_numbers(what: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return an array of whole numbers. Raises DataError for other values, for negative ones, and for none."""
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer) or int(array.min()) < 0:
        raise DataError(
            f"{what} must be whole numbers, 0 or more, in one dimension; got {array.dtype} in shape {array.shape}"
            + (f", the smallest {array.min()}" if array.size and np.issubdtype(array.dtype, np.number) else "")
        )
    return array.astype(np.int64)


def refuse_other_size(what: str, ours: int, samples: int) -> None:
    if ours != samples:
        raise DataError(f"{what} for {ours} samples were given, but the data set has {samples}")


# Shuffled and Sequential ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shuffled:
    """A new random order in each epoch: constant time and memory for any number of samples.

    Examples:
        >>> loader = fd.elastic.DataLoader(dataset, global_batch_size=16, order=fd.elastic.Shuffled())
    """

    identity = "shuffled"

    def length(self, samples: int) -> int:
        return samples

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        permutation_of = lru_cache(maxsize=2)(lambda epoch: Permutation(layout.size, seed, epoch))
        permutation_of(0)  # raises for an invalid seed

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            return permutation_of(epoch)(positions)

        return look_up


@dataclass(frozen=True)
class Sequential:
    """The order 0, 1, 2, ... in each epoch.

    Examples:
        >>> loader = fd.elastic.DataLoader(dataset, global_batch_size=16, order=fd.elastic.Sequential())
    """

    identity = "sequential"

    def length(self, samples: int) -> int:
        return samples

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        Permutation(layout.size, seed, 0)  # raises for an invalid seed: random numbers depend on it, too
        return _same


def _same(_epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


# The partition of a global batch --------------------------------------------------------------------------------------
#
# The positions of the global order on which a rank trains.
#
# Nothing here is stored: every division depends on the cursor and the world, so that a change of the world divides
# the remaining samples again and nothing else.


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


# The permutation ------------------------------------------------------------------------------------------------------
#
# A pseudo-random order of N samples with random access, without a list of N numbers.
#
# `mixer6`: six rounds of add, multiply by an odd number and xor-shift on k bits, each of them invertible, and cycle
# walking from 2**k down to N. The index stream asks it for the sample at a position.


# Saved cursors mean nothing under another order: a change of any output must increase this number.
FORMAT_VERSION = 1
MAX_SIZE = 2**62
ROUNDS = 6
_FEW = 16

# Constants of splitmix64.
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_U64 = 2**64 - 1
_Words: TypeAlias = NDArray[np.uint32] | NDArray[np.uint64]
_Mix: TypeAlias = Callable[[_Words], None]


@dataclass(frozen=True)
class MixerRound:
    """A round of the mixer: x -> (x + add) * multiply mod 2**k, then x ^= x >> shift."""

    add: int
    multiply: int
    divide: int  # inverse of multiply mod 2**64, and so mod 2**k
    shift: int


class Permutation:
    """The order of one epoch: a bijection of [0, size) that depends on (size, seed, epoch) only.

    Built in O(1) time and memory. Raises DataError for a size outside 1..2**62, or a seed or epoch outside 0..2**64 -
    1.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise DataError(f"an order needs 1 to 2**62 samples, got {size}")
        for name, value in (("seed", seed), ("epoch", epoch)):
            if not 0 <= value <= _U64:
                raise DataError(f"{name} must be in 0..2**64 - 1, got {value}")
        self.size, self.seed, self.epoch = size, seed, epoch
        self.bits = max(1, (size - 1).bit_length())
        self.rounds = _rounds(self.bits, seed, epoch)
        # Arithmetic mod 2**32 is right mod 2**k as well, and processors handle eight such words at once.
        self._word: np.dtype[Any] = np.dtype(np.uint32 if self.bits <= 32 else np.uint64)
        self._mask = np.array((1 << self.bits) - 1, self._word)
        self._keys = [_narrowed(each, self._word) for each in self.rounds]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample at each position (int64, same shape). Raises DataError for one outside [0, size)."""
        return self._walk(positions, self._mix, self._walk_one)

    def inverse(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each sample (int64, same shape). Raises DataError for one outside [0, size)."""
        return self._walk(indices, self._unmix, None)

    def sample_at(self, position: int) -> int:
        """Return the sample at one position, in plain Python: the definition, against which the fast methods are
        checked."""
        if not 0 <= position < self.size:
            raise DataError(f"expected values in [0, {self.size}), got {position}")
        return self._walk_one(position)

    def _walk_one(self, x: int) -> int:
        mask = (1 << self.bits) - 1
        while True:
            for key in self.rounds:
                x = (x + key.add) * key.multiply & mask
                x ^= x >> key.shift
            if x < self.size:
                return x

    def _walk(self, values: NDArray[np.int64], mix: _Mix, walk_one: Callable[[int], int] | None) -> NDArray[np.int64]:
        """Mix until every value is below size. The last few values are walked one by one, with `walk_one`: a call of
        numpy takes as long for one value as for a hundred. The loop ends, because `mix` permutes [0, 2**k): each walk
        is on a cycle that leads back to a value below size, after two mixes on average at most: 2**k <= 2 * size."""
        wide = values.astype(np.uint64).ravel()
        if wide.size and int(wide.max()) >= self.size:  # a negative value has become a huge one
            raise DataError(f"expected values in [0, {self.size}), got {values.min()}..{values.max()}")
        x: _Words = wide.astype(self._word, copy=False)
        mix(x)
        if self.size < 1 << self.bits:
            outside = (x >= self.size).nonzero()[0]
            while outside.size:
                if walk_one is not None and outside.size <= _FEW:
                    x[outside] = [walk_one(value) for value in x[outside].tolist()]
                    break
                again = x[outside]
                mix(again)
                x[outside] = again
                outside = outside[(again >= self.size).nonzero()[0]]
        return x.astype(np.int64).reshape(values.shape)

    def _mix(self, x: _Words) -> None:
        """Mix in place. The mask comes before the shift, which would let higher bits in."""
        shifted = np.empty_like(x)
        for key in self._keys:
            np.add(x, key[0], out=x)
            np.multiply(x, key[1], out=x)
            np.bitwise_and(x, self._mask, out=x)
            np.right_shift(x, key[3], out=shifted)
            np.bitwise_xor(x, shifted, out=x)

    def _unmix(self, x: _Words) -> None:
        for add, _, divide, by in reversed(self._keys):
            shift = int(by)
            while shift < self.bits:  # the inverse of 1 + S is (1 + S)(1 + S^2)(1 + S^4)..., S the shift
                x ^= x >> self._word.type(shift)
                shift *= 2
            x *= divide
            x -= add
            x &= self._mask


def _narrowed(key: MixerRound, word: np.dtype[Any]) -> tuple[_Words, ...]:
    """Return add, multiply, divide and shift in the words that are mixed; as arrays, because numpy takes twice as long
    to begin a call with a number."""
    most = int(np.iinfo(word).max)
    return tuple(np.array(value & most, word) for value in (key.add, key.multiply, key.divide, key.shift))


def _rounds(bits: int, seed: int, epoch: int) -> tuple[MixerRound, ...]:
    stream = _splitmix64(seed, epoch)
    half = (bits + 1) // 2
    rounds = []
    for _ in range(ROUNDS):
        add, multiply, coin = next(stream), next(stream) | 1, next(stream) >> 63
        shift = max(1, half - coin)  # a shift by 0 would erase x
        rounds.append(MixerRound(add, multiply, pow(multiply, -1, 2**64), shift))
    return tuple(rounds)


def _splitmix64(seed: int, epoch: int) -> Iterator[int]:
    """Yield the numbers of Steele, Lea and Flood's generator, started from the seed and *then* the epoch."""
    state = absorbed(seed, epoch)
    while True:
        state = (state + GAMMA) & _U64
        yield finalize(state)


def absorbed(*words: int) -> int:
    """Return the state of the generator after these words, one after the other: with seed + epoch, the first epoch of
    seed 1 would have the order of the second epoch of seed 0."""
    state = 0
    for word in words:
        state = finalize(((state ^ word) + GAMMA) & _U64)
    return state


def finalize(z: int) -> int:
    """Apply the generator's output function, a bijection of the 64-bit words."""
    z = ((z ^ (z >> 30)) * MULTIPLIERS[0]) & _U64
    z = ((z ^ (z >> 27)) * MULTIPLIERS[1]) & _U64
    return z ^ (z >> 31)


# The index stream -----------------------------------------------------------------------------------------------------
#
# The samples to fetch next: a batch sampler that the loader may move to another position at any time.
#
# The position to fetch from runs ahead of the cursor as far as the prefetching needs, but not beyond the epoch: code
# between two epochs may change the data set. Nothing that is saved or compared depends on it. Between two restarts,
# position and world are fixed; `restart_id` numbers them.


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
