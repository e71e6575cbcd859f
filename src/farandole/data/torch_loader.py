"""The side of both loaders towards torch: prefetching, small tensors by value, rows of tensors, and the checks of a
data set and of torch's arguments.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, Subset, TensorDataset

from farandole.errors import ConfigError, DataError


class OnWay(Protocol):
    """A requested batch; `restart_id` numbers the restart that it belongs to."""

    @property
    def restart_id(self) -> int: ...


OnWayT = TypeVar("OnWayT", bound=OnWay)


class RequestStream(Protocol[OnWayT]):
    """An endless stream of the batches to fetch next (index_stream.py, stream_reader.py)."""

    on_way: deque[OnWayT]

    @property
    def restart_id(self) -> int: ...


class Prefetch(Generic[OnWayT]):
    """Takes batches out of a torch DataLoader whose sampler is `requests`, or out of a RowReader.

    Its loader workers are started by the first take() and end with close(), or when this object is freed: the iterator
    holds no reference to it.
    """

    def __init__(self, loader: TorchDataLoader[Any] | RowReader, requests: RequestStream[OnWayT]) -> None:
        self._loader, self._requests = loader, requests
        self._iterator: Iterator[Any] | None = None

    def take(self) -> tuple[OnWayT, Any]:
        """Return the next batch since the last restart, collated; batches of earlier restarts are dropped. Raises the
        errors of the data set; then, as after any other error here, close() is needed before the next call."""
        if self._iterator is None:
            self._iterator = self._start()
        while True:
            data = next(self._iterator)
            requested = self._requests.on_way.popleft()
            if requested.restart_id == self._requests.restart_id:
                return requested, data

    def close(self) -> None:
        """End the loader workers and drop the batches being fetched. Idempotent."""
        # Private, but torch has no public way: without it they would live as long as the traceback of an error
        # (torch 2.13, torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter._shutdown_workers).
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._iterator = None
        self._requests.on_way.clear()

    def _start(self) -> Iterator[Any]:
        # As in torch, the loader workers' seeds depend on the main process's seed; but no number is taken from its
        # generator: a repeated step would see other ones. Without a generator of the loader, torch takes its base seed
        # from the default one (torch 2.13, torch/utils/data/dataloader.py, _BaseDataLoaderIter.__init__).
        if isinstance(self._loader, TorchDataLoader) and self._loader.generator is not None:
            self._loader.generator.manual_seed(torch.initial_seed())
        return iter(self._loader)


# Transfer of small tensors from the loader processes, in the message itself -------------------------------------------
#
# torch sends a tensor's shared memory instead, a file descriptor that the receiver fetches over a separate
# connection: half a millisecond for each tensor, and more when the processors are busy. That is right for large
# tensors.

# Limited so that the batches that two loader processes prepare ahead fit into the pipe (64 KiB). A loader process that
# is killed while it waits for space leaves half a message there, which torch notices in the main thread only.
_LARGEST_BYTES = 16 * 1024


class SmallByValue:
    """A worker_init_fn that sends small tensors by value. Two tensors of a batch that share memory no longer do so
    afterwards."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ForkingPickler.register(torch.Tensor, reduce_by_value)
        if self._then is not None:
            self._then(worker)


def reduce_by_value(tensor: torch.Tensor) -> Any:
    """Return the reduction of a tensor for pickle: by value when it is small and numpy has its type, else as torch
    does."""
    is_dense = tensor.layout is torch.strided and tensor.is_cpu
    # With other strides, such as channels last, numpy would keep the values only.
    if is_dense and tensor.nbytes <= _LARGEST_BYTES and tensor.is_contiguous():
        try:
            return torch.from_numpy, (tensor.numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, quantized, with a gradient
            pass
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


# Data sets of tensors, whose batches are rows of them -----------------------------------------------------------------
#
# The rows are indexed all at once, several times as fast as one by one and stacked.


class Rows:
    """A TensorDataset, or a Subset of one, whose __getitems__ returns the batch that torch would stack from the
    items."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._tensors: tuple[torch.Tensor, ...] = innermost_dataset(dataset).tensors
        self._can_select = all(each.is_cpu and each.dtype in _SELECTED for each in self._tensors)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        dataset = self._dataset
        while isinstance(dataset, Subset):
            indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
        rows = np.array(indices, dtype=np.int64)  # torch takes three times as long for a list
        selected = torch.from_numpy(rows)
        if self._can_select and (dataset is self._dataset or rows.min(initial=0) >= 0):
            return [tensor.index_select(0, selected) for tensor in self._tensors]
        return [tensor[selected].contiguous() for tensor in self._tensors]


# index_select() takes half the time of an index, and knows neither negative indices nor every type.
_SELECTED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool}
)


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


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return Rows' batch as it is, in place of a collation."""
    return batch


def innermost_dataset(dataset: Any) -> Any:
    """Return the data set below all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


# Map-style data sets --------------------------------------------------------------------------------------------------


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


# Arguments of torch's DataLoader with another meaning here, or none: each is refused with its reason ------------------

_OWN_ORDER = "seed and order determine the order of samples, so that they can be divided again when workers change"

# Values that request the default behaviour.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "batch_size": (),
    "sampler": (None,),
    "batch_sampler": (None,),
    "generator": (None,),
    "persistent_workers": (True,),
    "in_order": (True,),
    "shuffle": (False, None),
    "drop_last": (False,),
}

_REASONS: Mapping[str, str] = {
    "batch_size": "in torch it counts the samples of one worker; give global_batch_size, which counts those of all",
    "sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "batch_sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "generator": "random numbers are derived from seed, so that they are the same on every worker; give seed=",
    "persistent_workers": "loader workers live until close(), across epochs and regroups",
    "in_order": "batches are returned in the order of the epoch, since the cursor counts them in that order",
}

_ORDER_OF_STREAMS = "samples have the order in which the streams of the data set yield them"
STREAM_ARGUMENTS: Mapping[str, str] = {
    **_REASONS,
    "sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "batch_sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "shuffle": f"{_ORDER_OF_STREAMS}; shuffle in the data set, by the number that is passed to set_epoch()",
    "drop_last": "the last global batch of an epoch is shorter: the length of a stream is not known in advance",
}
"""Reasons of StreamLoader."""


def refuse_torch_arguments(
    given: Mapping[str, object],
    known: Iterable[str],
    num_workers: int,
    loader: str = "DataLoader",
    reasons: Mapping[str, str] = _REASONS,
) -> None:
    """Raise ConfigError for an argument of torch that cannot be supported, TypeError for an unknown one."""
    for name, value in given.items():
        if name not in reasons:
            close = difflib.get_close_matches(name, [*known, *reasons], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{loader} has no argument {name!r}{hint}")
        is_harmless = any(value is each for each in _HARMLESS[name])
        # Without loader workers none could live on.
        if not is_harmless and not (name == "persistent_workers" and num_workers == 0):
            raise ConfigError(f"{loader}: {name}={value!r} is not supported: {reasons[name]}")
