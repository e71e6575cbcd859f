"""Merge the outputs of the replicas into that of the whole batch, in the order of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from farandole.errors import ConfigError
from farandole.parallel.nesting import together

Scalars = Literal["mean", "sum", "each"]


def merge(outputs: Sequence[Any], samples: Sequence[int], dim: int, scalars: Scalars) -> Any:
    """Return one output of the replicas' form.

    Tensors are concatenated along `dim`. Values that are not tensors must be equal in all outputs. `samples` are the
    numbers of samples of the replicas: the weights of "mean". `scalars` is the treatment of tensors without dimensions,
    as in DataParallel. Raises ConfigError for outputs that do not fit together.
    """
    return together(outputs, lambda leaves, path: _joined(leaves, path, samples, dim, scalars))


def _joined(leaves: list[Any], path: str, samples: Sequence[int], dim: int, scalars: Scalars) -> Any:
    first = leaves[0]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _same(leaves, path)
    if first.dim() == 0:
        return _scalar(leaves, path, samples, scalars)
    if len(leaves) == 1:
        return first
    try:
        return torch.cat(leaves, dim)
    except (RuntimeError, IndexError) as error:
        raise ConfigError(
            f"output{path} of the replicas cannot be merged along dimension {dim}: shapes "
            f"{[tuple(leaf.shape) for leaf in leaves]}, for parts of {list(samples)} samples; {error}"
        ) from error


def _scalar(leaves: list[torch.Tensor], path: str, samples: Sequence[int], scalars: Scalars) -> torch.Tensor:
    if scalars == "each":
        return torch.stack(leaves)
    if len(leaves) == 1:
        return leaves[0]
    if scalars == "sum":
        return torch.stack(leaves).sum(dtype=leaves[0].dtype)
    if leaves[0].is_floating_point() or leaves[0].is_complex():
        total = sum(samples)
        weights = [count / total for count in samples]
        return torch.stack([leaf * weight for leaf, weight in zip(leaves, weights, strict=True)]).sum()
    _same([leaf.item() for leaf in leaves], path)
    return leaves[0]


def _same(leaves: list[Any], path: str) -> Any:
    first = leaves[0]
    if all(leaf is first or _equal(leaf, first) for leaf in leaves):
        return first
    raise ConfigError(
        f"the replicas returned different values in output{path}: {leaves}; where that is no mean, return a "
        'tensor, which DataParallel(..., scalars="sum") adds up and scalars="each" returns for each replica'
    )


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - whatever values of the user raise: they cannot be said to be equal
        return False
