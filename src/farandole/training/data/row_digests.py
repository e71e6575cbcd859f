"""Digests of the samples in a batch, by which workers find out whether their data sets are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farandole.training.state.tensor_digest import digest_of

_MOST_ROWS = 32


@torch.no_grad()
def row_digests(data: Any, indices: Sequence[int]) -> dict[str, int]:
    """Return a digest of each of some samples, by its index and the shapes of its tensors: a batch may pad its samples
    to the longest one. Empty where the batch has no tensors with a row for each sample.

    Args:
        data: A batch.
        indices: The samples in it, in order.
    """
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
