"""Shuffled, the default order, and Sequential. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from farandole.data.orders.order import Lookup
from farandole.data.partition import Layout
from farandole.data.permutation import Permutation


@dataclass(frozen=True)
class Shuffled:
    """A new random order in each epoch: constant time and memory for any number of samples."""

    identity = "shuffled"

    def length(self, samples: int) -> int:
        return samples

    def bind(self, layout: Layout, seed: int) -> Lookup:
        permutation_of = lru_cache(maxsize=2)(lambda epoch: Permutation(layout.size, seed, epoch))
        permutation_of(0)  # raises for an invalid seed

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            return permutation_of(epoch)(positions)

        return look_up


@dataclass(frozen=True)
class Sequential:
    """The order 0, 1, 2, ... in each epoch."""

    identity = "sequential"

    def length(self, samples: int) -> int:
        return samples

    def bind(self, layout: Layout, seed: int) -> Lookup:
        Permutation(layout.size, seed, 0)  # raises for an invalid seed: random numbers depend on it, too
        return _same


def _same(_epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions
