"""Divide a batch into the parts that replicas compute: views of the tensors, and other values unchanged."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from farandole.errors import ConfigError
from farandole.parallel.nesting import changed, together


@dataclass(frozen=True)
class Part:
    """The samples low to high of a batch, as positional and named arguments."""

    low: int
    high: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def samples(self) -> int:
        return self.high - self.low


def divide(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, most: int, min_local_batch: int) -> list[Part]:
    """Return at most `most` parts, as equal as possible, each of `min_local_batch` samples or more.

    There is one part when there are too few samples. Tensors of the batch size along `dim` are divided: each part is a
    view. Tensors of size 1 there, or without that dimension, and values that are not tensors are passed whole to each
    part. Without any tensor there is one part.

    Raises ConfigError when tensors differ in their number of samples.
    """
    samples = _samples((args, kwargs), dim)
    count = max(1, min(most, samples // min_local_batch))
    if count == 1:
        return [Part(0, samples, args, kwargs)]
    bounds = [samples * place // count for place in range(count + 1)]
    parts = []
    for low, high in itertools.pairwise(bounds):

        def cut(leaf: Any, low: int = low, high: int = high) -> Any:
            return leaf.narrow(dim, low, high - low) if _size(leaf, dim) == samples else leaf

        parts.append(Part(low, high, changed(args, cut), changed(kwargs, cut)))
    return parts


def _samples(inputs: Any, dim: int) -> int:
    """Return the number of samples along `dim`; 0 without any tensor."""
    found: dict[int, tuple[str, torch.Size]] = {}

    def look(leaves: list[Any], path: str) -> None:
        size = _size(leaves[0], dim)
        if size is not None:
            found.setdefault(size, (path, leaves[0].shape))

    if any(isinstance(each, PackedSequence) for each in (*inputs[0], *inputs[1].values())):
        raise ConfigError(
            "a PackedSequence cannot be divided among replicas: pass padded tensors, and pack in forward()"
        )
    together([inputs[0]], look)
    together([inputs[1]], look)
    several = [size for size in found if size != 1]
    if len(several) > 1:
        listed = ", ".join(f"{tuple(found[size][1])} at {found[size][0]}" for size in several)
        raise ConfigError(
            f"inputs have different numbers of samples along dimension {dim}: {listed}; a tensor that every replica "
            "needs whole belongs into the module as a buffer, or has size 1 there"
        )
    return several[0] if several else (1 if found else 0)


def _size(leaf: Any, dim: int) -> int | None:
    if not isinstance(leaf, torch.Tensor) or not -leaf.dim() <= dim < leaf.dim():
        return None
    return leaf.size(dim)
