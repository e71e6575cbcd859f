"""A pseudo-random order of N samples with random access: no list of N numbers anywhere. Pure.

`mixer6`: six rounds of add, multiply by an odd number and xor-shift on k bits, each of them invertible, and
cycle walking from 2**k down to N. The dealer asks it which sample of the data set stands at a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.errors import DataError

# Saved cursors mean nothing under another order: whoever changes one output raises this number.
FORMAT_VERSION = 1
MAX_SIZE = 2**62
ROUNDS = 6

_GAMMA = 0x9E3779B97F4A7C15
_U64 = 2**64 - 1
_Mix: TypeAlias = Callable[[NDArray[np.uint64]], None]


@dataclass(frozen=True)
class _Round:
    """x -> (x + add) * multiply mod 2**k, then x ^= x >> shift."""

    add: np.uint64
    multiply: np.uint64
    divide: np.uint64  # inverse of multiply mod 2**64, and so mod 2**k
    shift: np.uint64


class Permutation:
    """The order of one epoch: a bijection of [0, size) that depends on (size, seed, epoch) only.

    Built in O(1) time and memory. Raises DataError for a size outside 1..2**62, or a seed or epoch outside
    0..2**64 - 1.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise DataError(f"an order needs 1 to 2**62 samples, got {size}")
        for name, value in (("seed", seed), ("epoch", epoch)):
            if not 0 <= value <= _U64:
                raise DataError(f"{name} must be in 0..2**64 - 1, got {value}")
        self.size, self.seed, self.epoch = size, seed, epoch
        self._bits = max(1, (size - 1).bit_length())
        self._mask = np.uint64((1 << self._bits) - 1)
        self._rounds = _rounds(self._bits, seed, epoch)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each position (int64, same shape). Raises DataError for one outside [0, size)."""
        return self._walk(positions, self._mix)

    def inverse(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position of each sample (int64, same shape). Raises DataError for one outside [0, size)."""
        return self._walk(indices, self._unmix)

    def _walk(self, values: NDArray[np.int64], mix: _Mix) -> NDArray[np.int64]:
        """Mix until every value is below size. Ends, because `mix` permutes [0, 2**k): each walk is on a
        cycle that leads back to a value below size, after two mixes on average at most: 2**k <= 2 * size."""
        x = values.astype(np.uint64).ravel()
        if x.size and int(x.max()) >= self.size:  # a negative value has become a huge one
            raise DataError(f"expected values in [0, {self.size}), got {values.min()}..{values.max()}")
        mix(x)
        outside = np.flatnonzero(x >= self.size)
        while outside.size:
            again = x[outside]
            mix(again)
            x[outside] = again
            outside = outside[again >= self.size]
        return x.view(np.int64).reshape(values.shape)

    def _mix(self, x: NDArray[np.uint64]) -> None:
        """In place. Arithmetic mod 2**64 is right mod 2**k; the mask comes before the shift, which would let
        higher bits in."""
        for key in self._rounds:
            x += key.add
            x *= key.multiply
            x &= self._mask
            x ^= x >> key.shift

    def _unmix(self, x: NDArray[np.uint64]) -> None:
        for key in reversed(self._rounds):
            shift = int(key.shift)
            while shift < self._bits:  # the inverse of 1 + S is (1 + S)(1 + S^2)(1 + S^4)..., S the shift
                x ^= x >> np.uint64(shift)
                shift *= 2
            x *= key.divide
            x -= key.add
            x &= self._mask


def _rounds(bits: int, seed: int, epoch: int) -> tuple[_Round, ...]:
    stream = _splitmix64(seed, epoch)
    half = (bits + 1) // 2
    rounds = []
    for _ in range(ROUNDS):
        add, multiply, coin = next(stream), next(stream) | 1, next(stream) >> 63
        shift = max(1, half - coin)  # a shift by 0 would erase x
        rounds.append(
            _Round(np.uint64(add), np.uint64(multiply), np.uint64(pow(multiply, -1, 2**64)), np.uint64(shift))
        )
    return tuple(rounds)


def _splitmix64(seed: int, epoch: int) -> Iterator[int]:
    """Steele, Lea and Flood's generator, started from the seed and *then* the epoch: with seed + epoch, the
    first epoch of seed 1 would have the order of the second epoch of seed 0."""
    state = 0
    for word in (seed, epoch):
        state = _finalize(((state ^ word) + _GAMMA) & _U64)
    while True:
        state = (state + _GAMMA) & _U64
        yield _finalize(state)


def _finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)
