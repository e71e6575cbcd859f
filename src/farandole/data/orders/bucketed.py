"""Bucketed: global batches of samples with about the same length, for little padding. Pure."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.data.orders.many import derived_seed
from farandole.data.orders.order import Lookup, fingerprint, refuse_other_size, whole_numbers
from farandole.data.partition import Layout
from farandole.data.permutation import Permutation
from farandole.errors import DataError


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

    def bind(self, layout: Layout, seed: int) -> Lookup:
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
            return _shuffle_batches(by_length, batch, derived_seed(seed, number), epoch)

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
        others = others[Permutation(full, derived_seed(seed, 0), epoch)(np.arange(full))]
    return np.concatenate((others.ravel(), short))
