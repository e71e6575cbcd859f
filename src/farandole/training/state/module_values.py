"""Values of modules that are neither parameters nor buffers, and that user code may change at any time: `training`,
`requires_grad`, and numbers in attributes (a count of calls, a temperature). They belong to the metadata of a state.

Most of them never change, and some are each worker's own, such as a rank: a state has only those that have changed
since it was first captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

Values = dict[str, dict[str, Any]]
"""Changed values by the name of the module or parameter, and their own name."""

_NUMBERS = frozenset({bool, int, float})
_TRAINING, _REQUIRES_GRAD = "training", "requires_grad"


class ModuleValues:
    """The values of some modules, by name, and what they were when this object was made."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = dict(modules)
        self._first: Values = {}
        self.search()

    def search(self) -> None:
        """Find numbers that were added to the modules since."""
        self._readers: list[tuple[str, tuple[str, ...], Callable[[Any], Any], dict[str, Any], Any]] = []
        for name, module in _named(self._modules):
            values = vars(module)
            keys = tuple(key for key, value in values.items() if type(value) in _NUMBERS)
            if isinstance(module, DistributedDataParallel):
                keys = (_TRAINING,)  # the others are torch's
            first = self._first.setdefault(name, dict(zip(keys, _read(keys)(values), strict=True)))
            self._readers.append((name, keys, _read(keys), values, tuple(first.get(key) for key in keys)))
        named = dict(_parameters(self._modules))
        self._names, self._parameters = list(named), list(named.values())
        self._flags = [
            self._first.setdefault(name, {_REQUIRES_GRAD: each.requires_grad})[_REQUIRES_GRAD]
            for name, each in named.items()
        ]

    def changed(self) -> Values:
        """Return the values that have changed since this object was made, as they are now. Called at each boundary."""
        found: Values = {}
        for name, keys, read, values, first in self._readers:
            try:
                now = read(values)
            except KeyError:  # deleted since
                continue
            if now != first:
                found[name] = {
                    key: value
                    for key, value, was in zip(keys, now, first, strict=True)
                    if value != was and type(value) in _NUMBERS
                }
        flags = [each.requires_grad for each in self._parameters]
        if flags != self._flags:
            for name, flag, was in zip(self._names, flags, self._flags, strict=True):
                if flag != was:
                    found[name] = {_REQUIRES_GRAD: flag}
        return found

    def load(self, saved: Values) -> None:
        """Load the result of changed(), of this worker or another one: all other values are those of the start."""
        self.search()
        for name, keys, _, values, first in self._readers:
            wanted = saved.get(name, {})
            for key, was in zip(keys, first, strict=True):
                value = wanted.get(key, was)
                if value is not None and values[key] != value:
                    values[key] = value
            values.update({key: value for key, value in wanted.items() if key not in keys})
        for name, parameter, was in zip(self._names, self._parameters, self._flags, strict=True):
            flag = saved.get(name, {}).get(_REQUIRES_GRAD, was)
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _named(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    seen = set[int]()
    for name, module in modules.items():
        for key, each in module.named_modules():
            if id(each) not in seen:
                seen.add(id(each))
                yield f"{name}.{key}", each


def _parameters(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, module in modules.items():
        for key, each in module.named_parameters():
            yield f"{name}.{key} (parameter)", each


def _read(keys: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return a function that returns the values of these keys as a tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda values: tuple(values[key] for key in keys)
