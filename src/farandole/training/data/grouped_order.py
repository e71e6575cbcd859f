"""Orders that choose among groups of samples: stratified, shard by shard, in buckets of similar length. Pure."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.errors import DataError
from farandole.training.data.partition import BatchLayout
from farandole.training.data.permutation import GAMMA, MULTIPLIERS, ROUNDS, Permutation, absorbed
from farandole.training.data.sample_order import Lookup, fingerprint, refuse_other_size, whole_numbers

# Stratified: every section of an epoch has each label in proportion ---------------------------------------------------


class Stratified:
    """Each sample once per epoch, with the labels evenly distributed.

    Any section of the order, and so each global batch, has each label in proportion to its share of the data set,
    within about one sample per label. The label at a position is the same in all epochs; its samples are in a new
    random order in each epoch. Memory is proportional to the number of samples.

    Args:
        labels: A label for each sample: numbers or texts.

    Raises:
        DataError: The labels are not one-dimensional, or there are none.

    Examples:
        >>> order = fd.elastic.Stratified(labels=[0, 1] * 128)
        >>> loader = fd.elastic.DataLoader(dataset, global_batch_size=16, order=order)
    """

    def __init__(self, labels: ArrayLike) -> None:
        array = np.asarray(labels)
        if array.ndim != 1 or not array.size:
            raise DataError(f"labels must be in one dimension, one for each sample; got shape {array.shape}")
        _, strata = np.unique(array, return_inverse=True)
        self._strata = strata.astype(np.int64)
        self.identity = f"stratified-{fingerprint(self._strata)}"

    def length(self, samples: int) -> int:
        refuse_other_size("labels", self._strata.size, samples)
        return samples

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        Permutation(layout.size, seed, 0)  # raises for an invalid seed
        sizes = np.bincount(self._strata)
        begins = np.cumsum(sizes) - sizes
        samples = np.argsort(self._strata, kind="stable")  # by stratum
        stratum_of, number_of = _interleave(sizes)
        permutations = ManyPermutations(sizes, seed)

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            stratum = stratum_of[positions]
            return np.asarray(samples[begins[stratum] + permutations(epoch, stratum, number_of[positions])])

        return look_up


def _interleave(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stratum of each position, and the number of the sample in it: the n samples of a stratum are at the
    fractions (i + 1/2) / n of the epoch, as nearly as the others allow."""
    strata = np.repeat(np.arange(sizes.size), sizes)
    numbers = np.arange(strata.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_place = np.argsort((numbers + 0.5) / sizes[strata], kind="stable")
    return strata[by_place], numbers[by_place]


# ShardLocal: one shard of the data set after the other, for samples that are read fastest in this way -----------------


class ShardLocal:
    """Each sample once per epoch, shard by shard.

    The shards are in a new random order in each epoch, and inside each shard so are its samples. All workers read from
    the same shard, or from two successive ones. Memory is proportional to the number of shards.

    Args:
        shard_sizes: Samples of each shard (file), in the order in which the data set counts them; none may be 0.

    Raises:
        DataError: A shard is empty, or the sizes are not whole numbers.

    Examples:
        >>> order = fd.elastic.ShardLocal(shard_sizes=[128, 128])
        >>> loader = fd.elastic.DataLoader(dataset, global_batch_size=16, order=order)
    """

    def __init__(self, shard_sizes: ArrayLike) -> None:
        self._sizes = whole_numbers("shard_sizes", shard_sizes)
        if self._sizes.min() < 1:
            raise DataError(f"shard number {int(self._sizes.argmin())} has no samples; leave it out of shard_sizes")
        self.identity = f"shard-local-{fingerprint(self._sizes)}"

    def length(self, samples: int) -> int:
        refuse_other_size("shard_sizes", int(self._sizes.sum()), samples)
        return samples

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        sizes = self._sizes
        begins = np.cumsum(sizes) - sizes
        # A number that no shard has: the order of the shards is unrelated to that in any of them.
        of_shards = absorbed(seed, sizes.size)
        inside = ManyPermutations(sizes, seed)

        @lru_cache(maxsize=2)
        def shards_of(epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            shards = Permutation(sizes.size, of_shards, epoch)(np.arange(sizes.size))
            return shards, np.cumsum(sizes[shards])

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            shards, ends = shards_of(epoch)
            which = np.searchsorted(ends, positions, side="right")
            shard = shards[which]
            place = positions - (ends[which] - sizes[shard])
            return begins[shard] + inside(epoch, shard, place)

        Permutation(layout.size, seed, 0)  # raises for an invalid seed
        return look_up


# Bucketed: global batches of samples with about the same length, for little padding -----------------------------------


class Bucketed:
    """Each sample once per epoch, in global batches of samples of about the same length.

    A new random order in each epoch is cut into windows of several global batches. Inside a window the samples are
    sorted by length, and the resulting batches come in random order. Each worker orders whole windows: about 0.1 us per
    sample of the global batch. Memory is proportional to the number of samples. Not for tail="carry", whose global
    batches would straddle the sorted ones.

    Args:
        lengths: A length for each sample: whole numbers, 0 or more.
        window: Global batches in a window: with more, less padding; with fewer, more randomness.

    Raises:
        DataError: The lengths or the window are invalid.

    Examples:
        >>> order = fd.elastic.Bucketed(lengths=[5] * 256)
        >>> loader = fd.elastic.DataLoader(dataset, global_batch_size=16, order=order)
    """

    def __init__(self, lengths: ArrayLike, window: int = 50) -> None:
        self._lengths = whole_numbers("lengths", lengths)
        if window < 1:
            raise DataError(f"window must be 1 global batch or more, got {window}")
        self.window = window
        self.identity = f"bucketed-{window}-{fingerprint(self._lengths)}"

    def length(self, samples: int) -> int:
        refuse_other_size("lengths", self._lengths.size, samples)
        return samples

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        if layout.tail == "carry":
            raise DataError('Bucketed cannot fill the last global batch from another epoch: use tail="short" or "drop"')
        batch, stride = layout.global_batch_size, self.window * layout.global_batch_size
        lengths = self._lengths
        Permutation(layout.size, seed, 0)  # raises for an invalid seed

        # The current one, and the next one, which fetching ahead may have reached.
        @lru_cache(maxsize=2)
        def samples_of(epoch: int, number: int) -> NDArray[np.int64]:
            drawn = np.arange(number * stride, min((number + 1) * stride, layout.end))
            samples = Permutation(layout.size, seed, epoch)(drawn)
            by_length = samples[np.argsort(lengths[samples], kind="stable")]
            return _shuffle_batches(by_length, batch, absorbed(seed, number), epoch)

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            numbers, samples = positions // stride, np.empty_like(positions)
            for number in np.unique(numbers).tolist():
                inside = numbers == number
                samples[inside] = samples_of(epoch, number)[positions[inside] - number * stride]
            return samples

        return look_up


def _shuffle_batches(samples: NDArray[np.int64], batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the batches of a sorted window in random order. Only the window's last one may be short. Its samples are
    random too: otherwise they would always be the longest of each epoch."""
    full, rest = divmod(samples.size, batch)
    begin = batch * int(Permutation(full + 1, seed, epoch)(np.zeros(1, np.int64))[0])
    short = samples[begin : begin + rest]
    others = np.concatenate((samples[:begin], samples[begin + rest :])).reshape(full, batch)
    if full:
        others = others[Permutation(full, absorbed(seed, 0), epoch)(np.arange(full))]
    return np.concatenate((others.ravel(), short))


# Many permutations at once: one for each group ------------------------------------------------------------------------


class ManyPermutations:
    """A set of permutations. Number i permutes [0, sizes[i]), as Permutation(sizes[i], absorbed(seed, i), epoch)
    does.

    sizes  int64, each 1..2**62
    """

    def __init__(self, sizes: NDArray[np.int64], seed: int) -> None:
        self._sizes = sizes.astype(np.uint64)
        self._bits = np.array([max(1, (size - 1).bit_length()) for size in sizes.tolist()], dtype=np.uint64)
        self._seed = seed

    def __call__(self, epoch: int, which: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the values of permutation which[j] at places[j], for each j (int64, one dimension)."""
        numbers, at = np.unique(which, return_inverse=True)
        bits, sizes = self._bits[numbers], self._sizes[numbers][at]
        keys = [tuple(key[at] for key in round_) for round_ in self._rounds(epoch, numbers, bits)]
        mask = ((np.uint64(1) << bits) - np.uint64(1))[at]
        x = places.astype(np.uint64)
        outside = np.arange(x.size)
        while outside.size:
            again = x[outside]
            for add, multiply, shift in keys:
                again += add[outside]
                again *= multiply[outside]
                again &= mask[outside]
                again ^= again >> shift[outside]
            x[outside] = again
            outside = outside[again >= sizes[outside]]
        return x.astype(np.int64)

    def _rounds(
        self, epoch: int, numbers: NDArray[np.int64], bits: NDArray[np.uint64]
    ) -> list[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]]:
        """Return add, multiply and shift of each round, for each of the permutations."""
        state = _absorb(np.full(numbers.size, absorbed(self._seed), np.uint64), numbers.astype(np.uint64))
        state = _absorb(_absorb(np.zeros_like(state), state), np.full_like(state, epoch))
        half = (bits + np.uint64(1)) // np.uint64(2)
        rounds = []
        for _ in range(ROUNDS):
            add, multiply, coin = (_draw(state) for _ in range(3))
            shift = np.maximum(np.uint64(1), half - (coin >> np.uint64(63)))
            rounds.append((add, multiply | np.uint64(1), shift))
        return rounds


def _absorb(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ word) + np.uint64(GAMMA)
    finalize_words(state)
    return state


def _draw(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the next word of each stream; advances the states."""
    state += np.uint64(GAMMA)
    word = state.copy()
    finalize_words(word)
    return word


# Weighted: samples drawn with replacement, some more often than others ------------------------------------------------


class Weighted:
    """Samples drawn with replacement: at each position a new draw, with a probability proportional to the sample's
    weight. An epoch may have a sample several times, or not at all.

    Args:
        weights: A weight for each sample: finite, 0 or more, not all 0.
        samples_per_epoch: Number of draws in an epoch; the number of weights unless given.

    Raises:
        DataError: The weights or samples_per_epoch are invalid.

    Examples:
        >>> order = fd.elastic.Weighted(weights=[1.0, 3.0] * 128)
        >>> loader = fd.elastic.DataLoader(dataset, global_batch_size=16, order=order)
    """

    def __init__(self, weights: ArrayLike, samples_per_epoch: int | None = None) -> None:
        self.weights = np.array(weights, dtype=np.float64)
        if self.weights.ndim != 1 or not self.weights.size:
            raise DataError(f"weights must be numbers in one dimension, got shape {self.weights.shape}")
        if not np.isfinite(self.weights).all() or self.weights.min() < 0 or not self.weights.any():
            raise DataError(
                f"weights must be finite, 0 or more, and not all 0; got {self.weights.min()}..{self.weights.max()}"
            )
        if samples_per_epoch is not None and samples_per_epoch < 1:
            raise DataError(f"samples_per_epoch must be 1 or more, got {samples_per_epoch}")
        self._length = samples_per_epoch or self.weights.size
        self.identity = f"weighted-{fingerprint(self.weights)}"

    def length(self, samples: int) -> int:
        refuse_other_size("weights", self.weights.size, samples)
        return self._length

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        Permutation(layout.size, seed, 0)  # raises for an invalid seed
        keep, other = alias_table(self.weights)

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            words = 2 * positions.astype(np.uint64)
            column = (_uniform(seed, epoch, words) * keep.size).astype(np.int64)
            is_kept = _uniform(seed, epoch, words + np.uint64(1)) < keep[column]
            return np.where(is_kept, column, other[column])

        return look_up


def alias_table(weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return Walker's table. Draw a column evenly, then the column itself with probability keep[column], else
    other[column]: the result is distributed in proportion to the weights.

    Columns below the mean are filled up from columns above it, one after the other; a column above the mean that has
    given too much is filled up by the next one. The assignment follows from the two running sums of the missing and the
    surplus amounts.
    """
    mean = math.fsum(weights.tolist()) / weights.size  # exact, so that every machine computes the same
    level = weights / mean
    keep, other = np.ones_like(level), np.arange(level.size)
    low, high = np.flatnonzero(level < 1), np.flatnonzero(level >= 1)
    if not low.size or not high.size:
        return keep, other
    missing, spare = np.cumsum(1 - level[low]), np.cumsum(level[high] - 1)
    before = np.concatenate(([0.0], missing[:-1]))
    giver = np.minimum(np.searchsorted(spare, before, side="right"), high.size - 1)
    keep[low], other[low] = level[low], high[giver]
    # The last column above the mean is left with the mean, but for rounding.
    overdrawn = np.searchsorted(missing, spare[:-1], side="left")
    is_overdrawn = overdrawn < low.size
    columns = np.flatnonzero(is_overdrawn)
    keep[high[columns]] = np.clip(1 + spare[columns] - missing[overdrawn[columns]], 0, 1)
    other[high[columns]] = high[columns + 1]
    return keep, other


def _uniform(seed: int, epoch: int, words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), 53 bits each: splitmix64's stream for (seed, epoch), at these positions."""
    z = np.uint64(absorbed(seed, epoch)) + (words + np.uint64(1)) * np.uint64(GAMMA)
    finalize_words(z)
    return np.asarray((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def finalize_words(z: NDArray[np.uint64]) -> None:
    """Apply permutation.finalize to each word, in place."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(multiplier)
    z ^= z >> np.uint64(31)
