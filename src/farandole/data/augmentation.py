"""Random numbers of a data set's items: a function of (seed, epoch, position in the epoch's order), so that an item
that is fetched again, by whichever worker or loader worker, is augmented in the same way. loader.py puts this around
the data set and the batch sampler."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, get_worker_info

from farandole.data.dealer import Dealer


class Keyed(msgspec.Struct, frozen=True):
    """The samples of one batch, and the place of the first one."""

    indices: list[int]
    seed: int
    epoch: int
    position: int


class KeyedSampler:
    """The dealer's batches, with their places."""

    def __init__(self, dealer: Dealer, seed: int) -> None:
        self._dealer, self._seed = dealer, seed

    def __iter__(self) -> Iterator[Keyed]:
        for indices in self._dealer:
            batch = self._dealer.on_way[-1].batch
            # A ghost's samples do not count; any place does.
            yield Keyed(indices, self._seed, batch.ticket.epoch, batch.low)


class SeededDataset:
    """A data set whose items see random numbers of their own. Everything else is the data set's.

    The generators of torch, numpy and Python are seeded for each item: 10 to 20 us. In the training process they are
    put back afterwards; they belong to the step there. A data set with __getitems__ is seeded once for each call, with
    the key of its first item: what its items see then depends on how the batch was divided.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitems__(self, keyed: Keyed) -> list[Any]:
        with generators_kept() if get_worker_info() is None else contextlib.nullcontext():
            return self._fetch(keyed)

    def _fetch(self, keyed: Keyed) -> list[Any]:
        indices, seed, epoch, position = keyed.indices, keyed.seed, keyed.epoch, keyed.position
        fetch_all = getattr(self._dataset, "__getitems__", None)
        # A Subset has one that only goes through the items, unless what it is a subset of has one.
        if fetch_all is not None and hasattr(_innermost(self._dataset), "__getitems__"):
            seed_item(seed, epoch, position)
            items: list[Any] = fetch_all(list(indices))
            return items
        items = []
        for place, index in enumerate(indices):
            seed_item(seed, epoch, position + place)
            items.append(self._dataset[index])
        return items


def with_places(dataset: Any, dealer: Dealer, seed: int) -> tuple[Any, Iterable[Any]]:
    """The data set whose items' random numbers follow from their places, and the batch sampler that tells it those;
    as they are when items are fixed tensors."""
    if type(_innermost(dataset)) is TensorDataset:
        return dataset, dealer
    return SeededDataset(dataset), KeyedSampler(dealer, seed)


def seed_item(seed: int, epoch: int, position: int) -> None:
    """Start the generators of torch, numpy and Python for the item at this position of the epoch."""
    packed = struct.pack("<qqq", seed & (2**63 - 1), epoch, position)
    value = int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"item").digest(), "little")
    torch.default_generator.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators of torch, numpy and Python back afterwards: in the training process the step owns them."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
