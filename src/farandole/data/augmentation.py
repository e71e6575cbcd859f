"""Random numbers of a data set's items, as a function of (seed, epoch, position in the epoch's order): an item that is
fetched again, by any worker or loader worker, is augmented in the same way. loader.py puts this around the data set and
the batch sampler."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from farandole.data.generators import DrawWatch, generators_kept
from farandole.data.index_stream import IndexStream
from farandole.data.rows import innermost


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
        for indices in self._index_stream:
            batch = self._index_stream.on_way[-1].batch
            # The samples of a dummy batch do not count, so any position will do.
            yield Keyed(indices, self._seed, batch.global_batch.epoch, batch.low)


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
                items = self._fetch(keyed.indices)
            finally:
                self._draws = watch.undo()
            if not self._draws:
                return items
        with generators_kept():
            return self._fetch_seeded(keyed)

    def _fetch(self, indices: list[int]) -> list[Any]:
        fetch_all = self._fetch_all()
        return fetch_all(list(indices)) if fetch_all is not None else [self._dataset[index] for index in indices]

    def _fetch_seeded(self, keyed: Keyed) -> list[Any]:
        indices, seed, epoch, position = keyed.indices, keyed.seed, keyed.epoch, keyed.position
        fetch_all = self._fetch_all()
        if fetch_all is not None:
            seed_item(seed, epoch, position)
            return fetch_all(list(indices))
        items = []
        for place, index in enumerate(indices):
            seed_item(seed, epoch, position + place)
            items.append(self._dataset[index])
        return items

    def _fetch_all(self) -> Callable[[list[int]], list[Any]] | None:
        fetch_all: Callable[[list[int]], list[Any]] | None = getattr(self._dataset, "__getitems__", None)
        # A Subset has one that only iterates over the items, unless the underlying data set has one.
        return fetch_all if hasattr(innermost(self._dataset), "__getitems__") else None


def with_places(dataset: Any, index_stream: IndexStream, seed: int) -> tuple[Any, Iterable[Any]]:
    """Return a data set whose items' random numbers depend on their positions, and the batch sampler that passes it
    these."""
    return SeededDataset(dataset), KeyedSampler(index_stream, seed)


def seed_item(seed: int, epoch: int, position: int) -> None:
    """Seed the generators of torch, numpy and Python for the item at this position of the epoch."""
    packed = struct.pack("<qqq", seed & (2**63 - 1), epoch, position)
    value = int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"item").digest(), "little")
    torch.default_generator.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
