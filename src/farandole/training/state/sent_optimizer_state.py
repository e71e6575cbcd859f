"""From the live state of an optimizer to values that can be sent."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from farandole.errors import ConfigError


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without holes, in another order than that of its dimensions."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


PARAMETER, ID = "farandole.parameter", "farandole.id"
"""Markers: (PARAMETER, place) stands for a parameter, (ID, place) for its id()."""
STRIDED = "farandole.strided"
"""Marker: (STRIDED, (tensor, strides)) stands for a tensor whose dimensions lie in memory in another order, such as a
result of torch.linalg.qr: matrix products round differently then."""
STAYS = ("farandole.stays", 0)
"""Marker of objects that belong to the process, or were found before."""
_LEAVES = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_OF_PROCESS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.GeneratorType,
    functools.partial,
)


class Made(NamedTuple):
    """Stands for an object of a class of the script, such as a preconditioner."""

    kind: type
    attributes: dict[str, Any]


class EntryConverter:
    """Turns live values into values that pickle and checkpoints accept, without copying tensors."""

    def __init__(self, parameters: Sequence[torch.Tensor], known: Sequence[Any]) -> None:
        self._places = {id(each): place for place, each in enumerate(parameters)}
        self._seen = {id(each): each for each in known}  # an object that is found twice is sent once

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = self._places.get(id(value))
            if place is not None:
                return PARAMETER, place
            return (STRIDED, (value, value.stride())) if _is_permuted(value) else value
        if type(value) is int and value in self._places:
            return ID, self._places[value]
        if type(value) in _LEAVES or isinstance(value, enum.Enum | type):
            return value
        if isinstance(value, torch.Generator):
            return value.get_state()
        if isinstance(value, _OF_PROCESS) or id(value) in self._seen:
            return STAYS
        if isinstance(value, Mapping | list | deque) or hasattr(value, "__dict__"):
            self._seen[id(value)] = value
        return self._nested(value)

    def _nested(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            kind = OrderedDict if isinstance(value, OrderedDict) else dict
            return kind((self._key(key), self(each)) for key, each in value.items())
        if isinstance(value, deque):
            return deque(map(self, value), value.maxlen)
        if isinstance(value, list):
            return list(map(self, value))
        if isinstance(value, tuple):
            return tuple(map(self, value)) if type(value) is tuple else type(value)(*map(self, value))
        if isinstance(value, set | frozenset):
            return type(value)(map(self, value))
        if type(value).__module__.partition(".")[0] in _FOREIGN:
            return STAYS
        if hasattr(value, "__dict__"):
            return Made(type(value), {key: self(each) for key, each in vars(value).items()})
        return value  # a NumPy number or array

    def _key(self, key: Any) -> Any:
        taken = self(key)
        if isinstance(taken, torch.Tensor) or taken is STAYS:
            raise ConfigError(
                f"an optimizer has state under a key of type {type(key).__name__}, which other workers do not have: "
                f"use parameters of its groups, strings or numbers as keys"
            )
        return taken


_FOREIGN = sys.stdlib_module_names | {"torch", "farandole"}
"""Modules whose objects belong to the process: locks, weak references, handles of hooks."""
