"""Many small permutations at once, one for each stratum or shard: equal to Permutation for each, without a loop over
them. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from farandole.data.orders.weighted import finalize_words
from farandole.data.permutation import GAMMA, ROUNDS, absorbed


class ManyPermutations:
    """A set of permutations. Number i permutes [0, sizes[i]), as Permutation(sizes[i], derived_seed(seed, i), epoch)
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


def derived_seed(seed: int, number: int) -> int:
    """Return a separate seed for a numbered object."""
    return absorbed(seed, number)


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
