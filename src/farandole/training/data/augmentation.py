"""Random numbers of a data set's items, as a function of (seed, epoch, position in the epoch's order): an item that is
fetched again, by any worker or loader worker, is augmented in the same way. fetching.py puts this around the data set
and the batch sampler.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import functools
import hashlib
import pickle
import random
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from torch.utils.data import Subset

from farandole.training.data.index_stream import IndexStream


class Keyed(msgspec.Struct, frozen=True):
    """The samples of a batch, with the position of the first one."""

    indices: list[int]
    seed: int
    epoch: int
    position: int


class KeyedSampler:
    """The index stream's batches, with their positions."""

    def __init__(self, index_stream: IndexStream, seed: int) -> None:
        self._index_stream, self._seed = index_stream, seed

    def __iter__(self) -> Iterator[Keyed]:
        for indexed in self._index_stream.requests():
            batch = indexed.batch
            # The samples of a dummy batch do not count, so any position will do.
            yield Keyed(indexed.indices, self._seed, batch.global_batch.epoch, batch.low)


class SeededDataset:
    """A data set whose items see random numbers of their own. Everything else is passed to the data set.

    The generators of torch, numpy and Python are seeded for each item, 10 to 20 us, once an item was seen to draw from
    them: the batch in which that happens is fetched again. Afterwards they are restored; in the training process they
    belong to the step. A data set with __getitems__ is seeded once for each call, with the key of its first item: its
    items' random numbers then depend on the division of the batch.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._draws = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # during unpickling
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitems__(self, keyed: Keyed) -> list[Any]:
        if not self._draws:
            watch = DrawWatch()
            try:
                items = self._fetch(keyed, is_seeded=False)
            finally:
                self._draws = watch.undo()
            if not self._draws:
                return items
        with generators_kept():
            return self._fetch(keyed, is_seeded=True)

    def _fetch(self, keyed: Keyed, is_seeded: bool) -> list[Any]:
        dataset = self._dataset
        # A Subset has one that only iterates over the items, unless the underlying data set has one.
        if hasattr(innermost_dataset(dataset), "__getitems__"):
            if is_seeded:
                seed_item(keyed.seed, keyed.epoch, keyed.position)
            fetched: list[Any] = dataset.__getitems__(list(keyed.indices))
            return fetched
        items = []
        for place, index in enumerate(keyed.indices):
            if is_seeded:
                seed_item(keyed.seed, keyed.epoch, keyed.position + place)
            items.append(dataset[index])
        return items


def seed_item(seed: int, epoch: int, position: int) -> None:
    """Seed the generators of torch, numpy and Python for the item at this position of the epoch."""
    packed = struct.pack("<qqq", seed & (2**63 - 1), epoch, position)
    value = int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"item").digest(), "little")
    torch.default_generator.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


# The global generators of torch, numpy and Python: restored after use, and checked for draws in each batch ------------

_WORDS = 624
_MT19937_BYTES = 4 * (_WORDS + 1)  # the words of the Mersenne Twister, and its position in them


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Return a context that restores the generators at its end: in the training process the step owns them."""
    of_torch, of_python = torch.get_rng_state(), _python_state()
    of_numpy = np.random.get_state() if _is_usual() else _numpy_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        _set_python_state(of_python)
        if isinstance(of_numpy, bytes):
            _set_numpy_state(of_numpy)
        else:
            np.random.set_state(of_numpy)


class DrawWatch:
    """Detection of draws from the generators, in each batch: 7 us in all. With Python's getstate() it would take 20 us
    more, with numpy's get_state() 200."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = _torch_state(), _python_state(), _numpy_state()

    def undo(self) -> bool:
        """Return whether a generator was drawn from, and restore all in this case. A normal number that numpy had in
        reserve is lost: it has none after it was seeded, as it is before each step."""
        has_drawn = _numpy_state() != self._numpy or _python_state() != self._python or _torch_state() != self._torch
        if has_drawn:
            torch.set_rng_state(torch.frombuffer(bytearray(self._torch), dtype=torch.uint8))
            _set_python_state(self._python)
            _set_numpy_state(self._numpy)
        return has_drawn


def _torch_state() -> bytes:
    state = torch.get_rng_state()  # whose comparison with another one would take ten times as long as that of bytes
    return ctypes.string_at(state.data_ptr(), state.nbytes)


# Python's generator as CPython has it: a position and the words, behind the head of the object (CPython 3.11 to 3.14,
# Modules/_randommodule.c, RandomObject). getstate() makes a tuple of 625 numbers of them.
_python: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
_python_address = id(_python) + object.__basicsize__

PythonState = tuple[bytes, float | None] | tuple[Any, ...]
"""The memory of Python's generator and the normal number in reserve; elsewhere the result of getstate()."""


def _python_state() -> PythonState:
    if not _has_known_layout():
        return random.getstate()
    return ctypes.string_at(_python_address, _MT19937_BYTES), _python.gauss_next  # type: ignore[attr-defined]


def _set_python_state(state: PythonState) -> None:
    if not isinstance(state[0], bytes):
        random.setstate(state)
        return
    ctypes.memmove(_python_address, state[0], _MT19937_BYTES)
    _python.gauss_next = state[1]  # type: ignore[attr-defined]


@functools.cache
def _has_known_layout() -> bool:
    """Return whether the memory of Python's generator is what its getstate() says."""
    if object.__basicsize__ + _MT19937_BYTES > _random.Random.__basicsize__:
        return False
    place, *words = np.frombuffer(ctypes.string_at(_python_address, _MT19937_BYTES), np.uint32).tolist()
    return bool((*words, place) == _python.getstate()[1])


def _is_usual() -> bool:
    """Return whether numpy has its default generator: np.random.set_bit_generator() was not called."""
    return type(get_bit_generator()) is np.random.MT19937


def _numpy_state() -> bytes:
    """Return numpy's state without a normal number in reserve. get_state() takes 50 us."""
    generator = get_bit_generator()
    if _is_usual():
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return pickle.dumps(generator.state)


def _set_numpy_state(state: bytes) -> None:
    if _is_usual():
        words = np.frombuffer(state, np.uint32)
        np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), 0, 0.0))
    else:
        get_bit_generator().state = pickle.loads(state)


def innermost_dataset(dataset: Any) -> Any:
    """Return the data set below all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
