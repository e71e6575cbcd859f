"""A hash of a set of samples, whose sum over parts is that of the whole. Pure; worker and checker use it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1


def ids_hash(ids: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the sum, modulo 2^64, of a mixed 64-bit number for each id (the finalizer of splitmix64).

    Two collections of equally many ids with the same hash are equal, except with a probability of 2^-64; deliberate
    collisions are not considered. The order of the ids does not matter; their multiplicity does.
    """
    x = np.asarray(ids, dtype=np.int64).astype(np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)  # not 0, which would be mixed to 0
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
