"""Data sets of tensors, whose batches are rows of those: taken all at once, several times as fast as one by one and
stacked. loader.py uses it where torch would stack them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset


class Rows:
    """A TensorDataset, or a Subset of one, whose __getitems__ gives what torch makes of their items."""

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
    """Whether its items are rows of tensors, and nothing of it is somebody's own."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(each.layout == torch.strided for each in dataset.tensors)


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Collates Rows: they are a batch."""
    return batch


def innermost(dataset: Any) -> Any:
    """What it is a subset of, however often."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
