"""Torch's own DataLoader does not divide its data among workers: each of them trains on all of it.

A script that divides the data itself must not be blamed: its data sets differ between workers. So a hash of what the
data sets hold in their attributes is compared; no sample is read for it, which might have effects.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from enum import Enum
from io import IOBase
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from farandole.base.env import read_fixed_env, read_worker_env
from farandole.errors import ConfigError
from farandole.training.state.content_hash import content_hash

UNDIVIDED = (SequentialSampler, RandomSampler, WeightedRandomSampler)
"""Torch's samplers that give each worker samples from all of the data."""

_DEPTH = 6  # of data sets in data sets, and of what they hold
_MOST_ITEMS = 1000  # at each end of a list
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray, np.generic)


class UndividedData:
    """What the loops of this process (None: all that it has) read from DataLoaders that do not divide it; empty (False)
    when a loop reads anything else, or what cannot be compared.

    hash     of the data sets, below 2 ** 50; 0: there are none
    samples  their number in the largest
    sampler  the name of its sampler
    """

    def __init__(self, loops: Sequence[Any] | None = None) -> None:
        self.hash, self.samples, self.sampler = 0, 0, ""
        if loops is None:
            loops = [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]
        # Torch's private class has them only under private names (torch 2.13, torch/utils/data/dataloader.py).
        if not loops or not all(_is_undivided(each._index_sampler, each._dataset) for each in loops):
            return
        largest = max(loops, key=lambda each: len(each._dataset))
        try:
            found = sorted(content_hash([_held(each._dataset, _DEPTH)]) for each in loops)
        except _UnknownError:
            return
        self.hash, self.samples = content_hash(found) % (1 << 50) or 1, len(largest._dataset)
        self.sampler = type(getattr(largest._index_sampler, "sampler", largest._index_sampler)).__name__

    def __bool__(self) -> bool:
        return self.hash != 0

    def text(self) -> str:
        """Return the remark for people."""
        return (
            f"each worker trained on all {self.samples} samples: torch's DataLoader with a {self.sampler} does not "
            f"divide them among workers, as ElasticSampler(dataset) does"
        )


def _is_undivided(batches: Any, dataset: Any) -> bool:
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    return type(sampler) in UNDIVIDED and not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")


class _UnknownError(Exception):
    """An object holds something that this process cannot compare with that of others."""


def _held(value: Any, depth: int) -> Any:
    """Return what a value holds as containers, tensors, arrays, text and numbers. Raises _UnknownError for other
    objects without attributes, such as open files."""
    kind = type(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _held(value.reshape(-1)[: 2 * _MOST_ITEMS].tolist(), depth)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (Enum, PurePath)) or kind.__module__ == "torch":
        return str(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return value.__qualname__
    if depth == 0:
        return kind.__qualname__
    if isinstance(value, Mapping):
        items = ((str(key), _held(each, depth - 1)) for key, each in islice(value.items(), _MOST_ITEMS))
        return [kind.__qualname__, len(value), *chain.from_iterable(items)]
    if isinstance(value, (list, tuple, range)):
        ends = chain(value[:_MOST_ITEMS], value[max(_MOST_ITEMS, len(value) - _MOST_ITEMS) :])
        return [kind.__qualname__, len(value), *(_held(each, depth - 1) for each in ends)]
    if isinstance(value, (set, frozenset)):
        return [kind.__qualname__, len(value), *sorted(map(repr, value))[:_MOST_ITEMS]]
    if isinstance(value, IOBase) or not hasattr(value, "__dict__"):
        raise _UnknownError(kind)
    return _held({"type": kind.__qualname__, **vars(value)}, depth - 1)


def refuse_undivided(loader: Any) -> None:
    """Raise ConfigError for a torch DataLoader from which each worker would train all of the data, in a job that has,
    or may get, several workers. A sampler of the user's own may divide the data, and is trusted."""
    if not isinstance(loader, DataLoader):
        return
    fixed = read_fixed_env()
    if read_worker_env() is None and (fixed is None or fixed.size == 1):
        return
    is_iterable = isinstance(loader.dataset, IterableDataset)
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if is_iterable or (type(sampler) in UNDIVIDED and type(loader.batch_sampler) in (BatchSampler, type(None))):
        ours = "StreamLoader" if is_iterable else "DataLoader"
        how = "its data set is an IterableDataset" if is_iterable else f"its sampler is a {type(sampler).__name__}"
        raise ConfigError(
            f"TorchState(loader=...) has torch's DataLoader, which does not divide the data among workers ({how}): "
            f"each worker would train all of it, and start again after a fault. Use fd.elastic.{ours}(dataset, "
            f"global_batch_size=...); or, under the commit rule as in Horovod, create the DataLoader with sampler="
            f"fd.elastic.ElasticSampler(dataset). Where the data set has only this worker's part, leave the loader "
            f"out of the state"
        )
