"""Data sets of tensors, whose batches are rows of them: indexed all at once, several times as fast as one by one and
stacked. loader.py uses it where torch would stack them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset


class Rows:
    """A TensorDataset, or a Subset of one, whose __getitems__ returns the batch that torch would stack from the
    items."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._tensors: tuple[torch.Tensor, ...] = innermost(dataset).tensors

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        dataset = self._dataset
        while isinstance(dataset, Subset):
            indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
        rows = torch.as_tensor(indices)
        return [tensor[rows].contiguous() for tensor in self._tensors]


def are_rows(dataset: Any) -> bool:
    """Return whether the items of a data set are rows of tensors, and its classes are torch's own."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(each.layout == torch.strided for each in dataset.tensors)


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return Rows' batch as it is, in place of a collation."""
    return batch


def innermost(dataset: Any) -> Any:
    """Return the data set below all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
