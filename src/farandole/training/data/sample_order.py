"""The order of samples, from an epoch to the batch of a rank. Pure.

order          the sequence of an epoch's samples: Shuffled, the default, or Sequential (grouped_order.py has others)
permutation    a pseudo-random order with random access, for Shuffled
partition      the positions of that sequence on which a rank trains, for any world
index stream   the samples that a loader fetches next
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.errors import DataError
from farandole.training.data.partition import BatchLayout
from farandole.training.data.permutation import Permutation

# lookup(epoch, positions): the samples at these positions of the epoch's order (int64, one dimension).
Lookup: TypeAlias = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


class Order(Protocol):
    """A mapping from positions to samples, with random access: only a cursor has to be saved.

    It holds the user's choice and no position; it is equal on all ranks.
    """

    @property
    def identity(self) -> str:
        """Short text that differs where a cursor would mean other samples; a part of the saved state."""

    def length(self, samples: int) -> int:
        """Return the number of positions of an epoch, for a data set of this size. Raises DataError when the order does
        not fit."""

    def bind(self, layout: BatchLayout, seed: int) -> Lookup:
        """Return the lookup function for a loader. It depends on (order, layout, seed) only. May take time and memory
        in proportion to the order's arguments. Raises DataError for an unsuitable layout."""


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
        return lambda epoch, positions: permutation_of(epoch)(positions)


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
        return lambda _epoch, positions: positions
