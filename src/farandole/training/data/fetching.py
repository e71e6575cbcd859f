"""The way from a data set to its batches: torch's DataLoader with our index stream as its sampler.

Batches of a data set of tensors are rows of them, which are indexed all at once: several times as fast as one by one
and stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from farandole.errors import DataError
from farandole.training.data.augmentation import KeyedSampler, SeededDataset
from farandole.training.data.index_stream import IndexedBatch, IndexStream
from farandole.training.data.prefetch import Prefetch, torch_loader
from farandole.training.state.tensor_digest import digest_of


class MapDataset(Protocol):
    """A data set with a length whose samples can be read in any order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def size_of(dataset: MapDataset) -> int:
    """Return the number of samples. Raises DataError for an object that is not a map-style data set."""
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__name__} is an IterableDataset: its samples cannot be read by index, "
            f"so they cannot be divided again when workers change; give one with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{type(dataset).__name__} needs __len__ and __getitem__ to be divided among workers")
    return len(dataset)


def fetch(
    dataset: MapDataset,
    index_stream: IndexStream,
    arguments: Mapping[str, Any],
    seed: int | None = None,
    seed_of_processes: Callable[[], int] = torch.initial_seed,
) -> Prefetch[IndexedBatch]:
    """Return the source of the batches that the index stream asks for.

    Args:
        dataset: The data set.
        index_stream: The batches to fetch.
        arguments: Those of torch's DataLoader; persistent_workers says whether loader processes outlive an epoch.
        seed: Seed of the random numbers that samples draw; None: they draw as they do without a loader.
        seed_of_processes: Returns the seed from which torch derives those of new loader processes.
    """
    inner_dataset: Any = dataset
    batch_sampler: Iterable[Any] = index_stream
    collate_fn, is_read_here = arguments["collate_fn"], False
    if are_rows(dataset):  # rows of tensors draw no random numbers
        if collate_fn is None:
            inner_dataset, collate_fn = Rows(dataset), _as_it_is
            is_read_here = not arguments["num_workers"] and not arguments["pin_memory"]
    elif seed is not None:
        inner_dataset, batch_sampler = SeededDataset(dataset), KeyedSampler(index_stream, seed)
    inner: Any = (
        RowReader(inner_dataset, index_stream)
        if is_read_here
        else torch_loader(inner_dataset, arguments, batch_sampler=batch_sampler, collate_fn=collate_fn)
    )
    return Prefetch(inner, index_stream, arguments["persistent_workers"], seed_of_processes)


# Data sets of tensors -------------------------------------------------------------------------------------------------


class Rows:
    """A TensorDataset, or a Subset of one, whose __getitems__ returns the batch that torch would stack from the
    items."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._can_select = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        dataset = self._dataset
        while isinstance(dataset, Subset):
            indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
        if dataset.tensors is not self._tensors:  # the script may replace them
            self._tensors = dataset.tensors
            self._can_select = all(each.is_cpu and each.dtype in _SELECTED for each in self._tensors)
        rows = np.array(indices, dtype=np.int64)  # torch takes three times as long for a list
        selected = torch.from_numpy(rows)
        if self._can_select and (dataset is self._dataset or rows.min(initial=0) >= 0):
            return [tensor.index_select(0, selected) for tensor in self._tensors]
        return [_rows_of(tensor, selected) for tensor in self._tensors]


# index_select() takes half the time of an index, and knows neither negative indices nor every type.
_SELECTED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool}
)

# torch 2.6 has no index of these types ("index_cpu" not implemented for 'UInt16'): the same bits are indexed instead.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _rows_of(tensor: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    signed = _SIGNED.get(tensor.dtype)
    if signed is None:
        return tensor[selected].contiguous()
    return tensor.view(signed)[selected].view(tensor.dtype).contiguous()


class RowReader:
    """Reads the requested rows in this process. torch's iterator would add some 20 us to each batch, for its profiler
    (torch 2.13, torch/utils/data/dataloader.py, _BaseDataLoaderIter.__next__)."""

    def __init__(self, rows: Rows, requests: Iterable[list[int]]) -> None:
        self._rows, self._requests = rows, requests

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return map(self._rows.__getitems__, self._requests)


def are_rows(dataset: Any) -> bool:
    """Return whether the items of a data set are rows of tensors, and its classes are torch's own."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(each.layout == torch.strided for each in dataset.tensors)


def _as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return Rows' batch as it is, in place of a collation."""
    return batch


# Digests of the samples in a batch, by which workers find out whether their data sets are the same --------------------

_MOST_ROWS = 32


@torch.no_grad()
def row_digests(data: Any, indices: Sequence[int]) -> dict[str, int]:
    """Return a digest of each of some samples in a batch, by its index and the shapes of its tensors: a batch may pad
    its samples to the longest one. Empty where the batch has no tensors with a row for each sample."""
    columns = [each for each in _tensors_in(data) if each.dim() and each.shape[0] == len(indices)]
    if not columns:
        return {}
    shapes = ";".join(str(tuple(each.shape[1:])) for each in columns)
    chosen = list(enumerate(indices))[:: -(-len(indices) // _MOST_ROWS)]
    return {f"{index} {shapes}": digest_of([each[row].contiguous() for each in columns]) for row, index in chosen}


def _tensors_in(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data] if data.layout is torch.strided else []
    if isinstance(data, Mapping):
        return [tensor for each in data.values() for tensor in _tensors_in(each)]
    return [tensor for each in data for tensor in _tensors_in(each)] if isinstance(data, list | tuple) else []
