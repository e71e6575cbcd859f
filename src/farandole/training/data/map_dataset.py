"""Map-style data sets: those whose samples can be read by index."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils.data import IterableDataset

from farandole.errors import DataError


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
