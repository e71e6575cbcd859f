"""Divide a batch among replicas, and merge their outputs in the order of the samples."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import PackedSequence

from farandole.errors import ConfigError


@dataclass(frozen=True)
class InputPart:
    """Some samples of a batch, as positional and named arguments."""

    samples: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def divide(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, most: int, min_local_batch: int) -> list[InputPart]:
    """Return at most `most` parts, as equal as possible, each of `min_local_batch` samples or more.

    There is one part when there are too few samples. Tensors of the batch size along `dim` are divided: each part is a
    view. Tensors of size 1 there, or without that dimension, and values that are not tensors are passed whole to each
    part. Without any tensor there is one part.

    Raises ConfigError when tensors differ in their number of samples.
    """
    samples = _samples((args, kwargs), dim)
    count = max(1, min(most, samples // min_local_batch))
    if count == 1:
        return [InputPart(samples, args, kwargs)]
    bounds = [samples * place // count for place in range(count + 1)]
    parts = []
    for low, high in itertools.pairwise(bounds):

        def cut(leaf: Any, low: int = low, high: int = high) -> Any:
            return leaf.narrow(dim, low, high - low) if _size(leaf, dim) == samples else leaf

        parts.append(InputPart(high - low, map_leaves(args, cut), map_leaves(kwargs, cut)))
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
    map_together([inputs[0]], look)
    map_together([inputs[1]], look)
    several = [size for size in found if size != 1]
    if len(several) > 1:
        listed = ", ".join(f"{tuple(found[size][1])} at {found[size][0]}" for size in several)
        raise ConfigError(
            f"inputs have different numbers of samples along dimension {dim}: {listed}; register a tensor that "
            "every replica needs as a whole as a buffer of the module, or give it size 1 there"
        )
    return several[0] if several else (1 if found else 0)


def _size(leaf: Any, dim: int) -> int | None:
    if not isinstance(leaf, torch.Tensor) or not -leaf.dim() <= dim < leaf.dim():
        return None
    return leaf.size(dim)


# Nested inputs and outputs: several values of the same form are traversed together ------------------------------------
#
# Containers are dicts and other mutable mappings, lists, tuples, named tuples and dataclasses; all other values are
# leaves. torch.utils._pytree and optree do not serve: the first is private, and for both a dataclass, a UserDict or a
# subclass of OrderedDict is a leaf unless its type was registered.

Leaf = Callable[[list[Any], str], Any]
"""Returns the new leaf, given those of all values and their path, as "['loss']"."""


def map_together(values: Sequence[Any], leaf: Leaf, path: str = "") -> Any:
    """Return a value of the common form of all `values`, with new leaves. Containers are new, of the first one's type.
    Raises ConfigError when the values differ in form."""
    first = values[0]
    if isinstance(first, MutableMapping):
        return _mapping(values, leaf, path)
    if isinstance(first, (list, tuple)):
        _alike(values, len, "items", path)
        items = [map_together([value[i] for value in values], leaf, f"{path}[{i}]") for i in range(len(first))]
        return _sequence(first, items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        _alike(values, type, "types", path)
        new = copy.copy(first)
        for field in dataclasses.fields(first):
            parts = [getattr(value, field.name) for value in values]
            object.__setattr__(new, field.name, map_together(parts, leaf, f"{path}.{field.name}"))  # it may be frozen
        return new
    return leaf(list(values), path)


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return one value with new leaves."""
    return map_together([value], lambda leaves, _: leaf(leaves[0]))


def _mapping(values: Sequence[MutableMapping[Any, Any]], leaf: Leaf, path: str) -> MutableMapping[Any, Any]:
    _alike(values, _keys, "keys", path)
    new = copy.copy(values[0])
    for key in list(new):
        new[key] = map_together([value[key] for value in values], leaf, f"{path}[{key!r}]")
    return new


def _keys(value: Any) -> object:
    return set(value) if isinstance(value, MutableMapping) else type(value)


def _sequence(like: Any, items: list[Any]) -> Any:
    if hasattr(like, "_make"):
        return like._make(items)
    if isinstance(like, list):
        new = copy.copy(like)
        new[:] = items
        return new
    return type(like)(items)  # a tuple, or the result of torch.max()


def _alike(values: Sequence[Any], what: Callable[[Any], object], name: str, path: str) -> None:
    found = [what(value) if type(value) is type(values[0]) else type(value) for value in values]
    if any(each != found[0] for each in found):
        raise ConfigError(
            f"the replicas returned outputs of different structure: output{path} has {name} {found}; forward() must "
            "return the same structure for every part of the batch"
        )


# The outputs of the replicas, merged into that of the whole batch in the order of the samples -------------------------

Scalars = Literal["mean", "sum", "each"]


def merge_outputs(outputs: Sequence[Any], samples: Sequence[int], dim: int, scalars: Scalars) -> Any:
    """Return one output of the replicas' form.

    Tensors are concatenated along `dim`. Values that are not tensors must be equal in all outputs. `samples` are the
    numbers of samples of the replicas: the weights of "mean". `scalars` is the treatment of tensors without dimensions,
    as in DataParallel. Raises ConfigError for outputs that do not fit together.
    """
    return map_together(outputs, lambda leaves, path: _joined(leaves, path, samples, dim, scalars))


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
        f"the replicas returned different values in output{path}: {leaves}; where the mean is not intended, return "
        'a tensor, which DataParallel(..., scalars="sum") adds up and scalars="each" returns for each replica'
    )


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - whatever values of the user raise: they cannot be said to be equal
        return False
