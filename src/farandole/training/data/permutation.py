"""The permutation of an epoch: a pseudo-random order of N samples with random access, which each process computes
alone, without a list of N numbers. Pure.

`mixer6`: six rounds of add, multiply by an odd number and xor-shift on k bits, each of them invertible, and cycle
walking from 2**k down to N. The index stream asks it for the sample at a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.errors import DataError

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
