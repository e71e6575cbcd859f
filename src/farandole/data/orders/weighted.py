"""Weighted: samples drawn with replacement, some more often than others. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.data.orders.order import Lookup, fingerprint, refuse_other_size
from farandole.data.partition import BatchLayout
from farandole.data.permutation import GAMMA, MULTIPLIERS, Permutation, absorbed
from farandole.errors import DataError


class Weighted:
    """Samples drawn with replacement: at each position a new draw, with a probability proportional to the sample's
    weight. An epoch may have a sample several times, or not at all.

    Args:
        weights: A weight for each sample: finite, 0 or more, not all 0.
        samples_per_epoch: Number of draws in an epoch; the number of weights unless given.

    Raises:
        DataError: The weights or samples_per_epoch are invalid.
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
