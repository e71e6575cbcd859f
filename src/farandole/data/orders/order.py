"""What an order of samples is; each file beside this one has one or two. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.data.partition import Layout
from farandole.errors import DataError

# lookup(epoch, positions): the samples at these positions of the epoch's order (int64, one dimension).
Lookup: TypeAlias = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


class Order(Protocol):
    """Which sample stands where, with random access: nothing but a cursor has to be remembered.

    It says what the user wants, and holds no place in it; the same on all ranks.
    """

    @property
    def identity(self) -> str:
        """A short text that differs where a cursor would mean other samples; goes into the saved state."""
        ...

    def length(self, samples: int) -> int:
        """Positions of an epoch, for a data set with so many samples. Raises DataError when it does not fit it."""
        ...

    def bind(self, layout: Layout, seed: int) -> Lookup:
        """What a loader asks. Depends on (order, layout, seed) only. May take time and memory in proportion to what
        the order was given. Raises DataError for a layout that it cannot serve."""
        ...


def fingerprint(*arrays: NDArray[np.int64] | NDArray[np.float64]) -> str:
    """Eight hexadecimal digits that tell these values from others, the same on every machine."""
    digest = hashlib.blake2b(digest_size=4)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def whole_numbers(what: str, values: ArrayLike) -> NDArray[np.int64]:
    """One whole number for each of something. Raises DataError for other things, for negative ones, and for none."""
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
