"""Stratified: every section of an epoch has each label in proportion. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.data.orders.many import ManyPermutations
from farandole.data.orders.order import Lookup, fingerprint, refuse_other_size
from farandole.data.partition import Layout
from farandole.data.permutation import Permutation
from farandole.errors import DataError


class Stratified:
    """Each sample once per epoch, with the labels evenly distributed.

    Any section of the order, and so each global batch, has each label in proportion to its share of the data set,
    within about one sample per label. The label at a position is the same in all epochs; its samples are in a new
    random order in each epoch. Memory is proportional to the number of samples.

    Args:
        labels: A label for each sample: numbers or texts.

    Raises:
        DataError: The labels are not one-dimensional, or there are none.
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

    def bind(self, layout: Layout, seed: int) -> Lookup:
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
