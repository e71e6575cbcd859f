"""Map nested inputs and outputs: several values of the same form are traversed together.

Containers are dicts and other mutable mappings, lists, tuples, named tuples and dataclasses; all other values are
leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from farandole.errors import ConfigError

Leaf = Callable[[list[Any], str], Any]
"""Returns the new leaf, given those of all values and their path, as "['loss']"."""


def together(values: Sequence[Any], leaf: Leaf, path: str = "") -> Any:
    """Return a value of the common form of all `values`, with new leaves. Containers are new, of the first one's type.

    Raises ConfigError when the values differ in form.
    """
    first = values[0]
    if isinstance(first, MutableMapping):
        return _mapping(values, leaf, path)
    if isinstance(first, (list, tuple)):
        _alike(values, len, "items", path)
        items = [together([value[i] for value in values], leaf, f"{path}[{i}]") for i in range(len(first))]
        return _sequence(first, items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        _alike(values, type, "types", path)
        new = copy.copy(first)
        for field in dataclasses.fields(first):
            parts = [getattr(value, field.name) for value in values]
            object.__setattr__(new, field.name, together(parts, leaf, f"{path}.{field.name}"))  # it may be frozen
        return new
    return leaf(list(values), path)


def changed(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return one value with new leaves."""
    return together([value], lambda leaves, _: leaf(leaves[0]))


def _mapping(values: Sequence[MutableMapping[Any, Any]], leaf: Leaf, path: str) -> MutableMapping[Any, Any]:
    _alike(values, _keys, "keys", path)
    new = copy.copy(values[0])
    for key in list(new):
        new[key] = together([value[key] for value in values], leaf, f"{path}[{key!r}]")
    return new


def _keys(value: Any) -> object:
    return set(value) if isinstance(value, MutableMapping) else type(value)


def _sequence(like: Any, items: list[Any]) -> Any:
    if hasattr(like, "_make"):
        return like._make(items)
    if type(like) in (list, tuple):
        return type(like)(items)
    if isinstance(like, list):
        new = copy.copy(like)
        new[:] = items
        return new
    return type(like)(items)  # e.g. the result of torch.max()


def _alike(values: Sequence[Any], what: Callable[[Any], object], name: str, path: str) -> None:
    found = [what(value) if type(value) is type(values[0]) else type(value) for value in values]
    if any(each != found[0] for each in found):
        raise ConfigError(
            f"the replicas returned outputs of different forms: output{path} has {name} {found}; forward() must return "
            "the same form whatever part of the batch it sees"
        )
