"""A state as it was at a boundary, copied while training continues; and its form in a checkpoint: JSON and named
tensors.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from farandole.base.membership import Progress
from farandole.errors import ConfigError
from farandole.training.state.deep_copy import BackgroundCopy, tensors_in
from farandole.training.state.packing import unpack
from farandole.training.state.sync import Kept
from farandole.training.state.tensor_digest import digest_of


@dataclass(frozen=True)
class Snapshot:
    """The data to be written. Its tensors are complete once the copies have ended: see Staging."""

    progress: Progress
    plain: Any
    tensors: Mapping[str, torch.Tensor]


def live(state: Kept, progress: Progress) -> Snapshot:
    """Return the captured metadata and the live tensors, not copied. Raises ConfigError for a state with values that a
    checkpoint cannot hold."""
    # The captured data were pickled in this process a moment ago.
    plain, tensors = to_json({"metadata": unpack(state.captured()), "tensors": state.live_tensors()})
    return Snapshot(progress, plain, tensors)


def digest_of_snapshot(snapshot: Snapshot) -> str:
    """Return 16 hexadecimal digits that depend on the bytes of all tensors, once they are complete, in their order."""
    return f"{digest_of(snapshot.tensors.values()):016x}"


class Staging:
    """Memory for one snapshot at a time, reused by the next one: as much as the state has, on the CPU."""

    def __init__(self) -> None:
        self.copies = BackgroundCopy()
        self._targets: dict[str, torch.Tensor] = {}

    def take(self, state: Kept, progress: Progress) -> Snapshot:
        """Take a snapshot right after state.capture(). The tensors are copied from now on, and are complete before an
        optimizer steps or `copies.finish()` returns. Raises the errors of live()."""
        snapshot = live(state, progress)
        tensors = {id(tensor) for tensor in tensors_in(state.live_tensors())}
        targets, later = {}, []
        for name, source in snapshot.tensors.items():
            target = self._target(name, source)
            if id(source) in tensors and source.device.type == "cpu":
                later.append((source.detach(), target))
            else:
                target.copy_(source.detach())
            targets[name] = target
        self._targets = targets
        self.copies.begin(later)
        return Snapshot(progress, snapshot.plain, targets)

    def _target(self, name: str, source: torch.Tensor) -> torch.Tensor:
        kept = self._targets.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (source.shape, source.dtype):
            return kept
        return torch.empty(source.shape, dtype=source.dtype, device="cpu")


# Python values as JSON and named tensors ------------------------------------------------------------------------------
#
# A checkpoint can hold plain values, containers, bytes, NumPy numbers and tensors, nested in any way. A value without
# a JSON form is an object whose key "$" names its kind. Reading one never runs code.

_KIND = "$"
_NUMBERS = "biuf"  # NumPy's kinds of numbers and booleans


def to_json(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a value that json can write, and the tensors that it names; they are the value's own, not copies.

    A tensor that occurs twice is named once. Raises ConfigError, with the place, for a value that cannot be written.
    """
    taker = _Encoder()
    return taker.take(value, ()), taker.tensors


def from_json(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value again, with `tensors` in it. Raises ConfigError for data that to_json() has not written."""
    if isinstance(plain, list):
        return [from_json(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if _KIND not in plain:
        return {key: from_json(each, tensors) for key, each in plain.items()}
    try:
        return _from_tagged(plain, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"this is not a value of a checkpoint: {str(plain)[:200]} ({error})") from error


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def take(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_KIND: "float", "of": repr(value)}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return {_KIND: "tensor", "name": self._name(value, path)}
        if kind is list:
            return self._items(value, path)
        if kind is dict and all(type(key) is str and not key.startswith(_KIND) for key in value):
            return {key: self.take(each, (*path, key)) for key, each in value.items()}
        return self._tagged(value, path)

    def _tagged(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in _MAPPINGS.values():
            pairs = [[self.take(key, path), self.take(each, (*path, str(key)))] for key, each in value.items()]
            return {_KIND: kind.__name__, "of": pairs}
        if kind in (tuple, set, frozenset, torch.Size):
            return {_KIND: "tuple" if kind is torch.Size else kind.__name__, "of": self._items(value, path)}
        if kind is deque:
            return {_KIND: "deque", "of": self._items(value, path), "maxlen": value.maxlen}
        if kind is bytes:
            return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            return {_KIND: "numpy", "dtype": value.dtype.name, "of": self.take(value.item(), path)}
        if kind is torch.dtype:
            return {_KIND: "dtype", "of": str(value).removeprefix("torch.")}
        place = ".".join(path)
        raise ConfigError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot contain: reading it could "
            f"run code; keep numbers, strings, containers and tensors in the state, or an object whose "
            f"state_dict() contains only these"
        )

    def _items(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.take(each, (*path, str(place))) for place, each in enumerate(values)]

    def _name(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ConfigError(
                f"{'.'.join(path)} is a tensor of layout {tensor.layout}: a checkpoint can contain dense tensors only"
            )
        known = self._names.get(id(tensor))
        if known is None:
            known = name = ".".join(path)
            while known in self.tensors:  # a key with a dot in it may look like two
                known = f"{name}#{len(self.tensors)}"
            self._names[id(tensor)], self.tensors[known] = known, tensor
        return known


_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _from_tagged(plain: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    kind = plain[_KIND]
    if kind == "tensor":
        return tensors[plain["name"]]
    of = plain["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_json(each, tensors) for each in of)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({from_json(key, tensors): from_json(each, tensors) for key, each in of})
    if kind == "deque":
        return deque((from_json(each, tensors) for each in of), plain["maxlen"])
    if kind == "float":
        return float(of)
    if kind == "bytes":
        return base64.b64decode(of)
    if kind == "numpy" and np.dtype(plain["dtype"]).kind in _NUMBERS:
        return np.dtype(plain["dtype"]).type(from_json(of, tensors))
    if kind == "dtype" and isinstance(dtype := getattr(torch, of), torch.dtype):
        return dtype
    raise ValueError(f"unknown kind {kind!r}")
