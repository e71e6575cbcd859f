"""Copies of nested values whose tensors may be filled in later. Commits are made of them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from farandole.errors import ConfigError

TensorPair = tuple[torch.Tensor, torch.Tensor]
"""(source, target)"""


class Snapshot:
    """One value as it was at the last commit. Memory for tensors is used again by the next commit.

    is_on_host  copies are in the host's memory, wherever the tensors are: for values that are copied back into theirs
    """

    def __init__(self, is_on_host: bool = False) -> None:
        self._is_on_host = is_on_host
        self._value: Any = None
        self._targets: list[torch.Tensor] = []

    def take(self, value: Any, is_later: Callable[[torch.Tensor], bool] | None = None) -> list[TensorPair]:
        """Remember `value`: containers and objects now; tensors for which `is_later` holds as soon as somebody
        carries out the returned copies, all others now."""
        walk = _Walk(self._targets, self._device)
        self._value = walk.copied(value)  # first, since it may raise
        self._targets = walk.targets
        later = []
        for source, target in zip(walk.sources, walk.targets, strict=True):
            detached = source.detach() if source.requires_grad else source
            if is_later is not None and is_later(source):
                later.append((detached, target))
            else:
                target.copy_(detached)
        return later

    def view(self) -> Any:
        """The value, with the snapshot's own tensors in it: only for those who copy out of them."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self._targets}
        return copy.deepcopy(self._value, memo)

    def copy(self) -> Any:
        """The value; nothing in it is shared with the snapshot."""
        return copy.deepcopy(self._value)

    def _device(self, source: torch.Tensor) -> torch.device:
        return _CPU if self._is_on_host else source.device


class _Walk:
    """Through one value, once: copies containers and objects as copy.deepcopy() does, several times as fast for what
    states are made of, and puts tensors into the copy that are still to be filled in.

    kept       such tensors of an earlier walk, which are used again where they have the layout
    device_of  where that of a tensor is to be
    sources    tensors in the order in which they are found, each once; `targets` are those in their places
    """

    def __init__(self, kept: Sequence[torch.Tensor], device_of: Callable[[torch.Tensor], torch.device]) -> None:
        self._kept, self._device_of = kept, device_of
        self._memo: dict[int, Any] = {}
        self.sources: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if kind in _TENSORS:
            return self._remember(value, self._target(value))
        if kind is dict or kind is OrderedDict:
            made = self._remember(value, kind())
            for key, each in value.items():
                made[key if type(key) in _LEAVES else self._otherwise(key)] = self.copied(each)
            if kind is OrderedDict and value.__dict__:  # the versions of a module's parts
                made.__dict__.update(self.copied(value.__dict__))
            return made
        if kind is list:
            made = self._remember(value, [])
            made.extend(map(self.copied, value))
            return made
        return self._otherwise(value)

    def _otherwise(self, value: Any) -> Any:
        """Of any other type. Tensors in it are not cloned, either, where a walk finds them."""
        for tensor in tensors_in(value):
            self.copied(tensor)
        return copy.deepcopy(value, self._memo)

    def _target(self, source: torch.Tensor) -> torch.Tensor:
        place, device = len(self.targets), self._device_of(source)
        target = self._kept[place] if place < len(self._kept) else None
        if target is None or target.device != device or _layout(target) != _layout(source):
            # Pinned, so that the device copies by itself, at its full speed.
            is_pinned = source.is_cuda and device.type == "cpu"
            target = torch.empty_like(source, device=device, pin_memory=is_pinned, requires_grad=False)
        self.sources.append(source)
        self.targets.append(target)
        return target

    def _remember(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        return made


_CPU = torch.device("cpu")


def deep_copy(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Named values, copied together, so that what they share stays shared. Tensors lose their graph.

    Raises ConfigError, naming the value, when one cannot be copied.
    """
    try:
        copied: dict[str, Any] = _copied(dict(values))
        return copied
    except Exception:
        for name, value in values.items():
            _refuse_uncopyable(name, value, owner)
        raise


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The plain tensors in nested dicts, lists and tuples, each once, always in the same order."""
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    """By the type first: at each commit every number of every state is asked."""
    kind = type(value)
    if kind in _LEAVES or id(value) in seen:
        return
    if kind in _TENSORS:
        seen.add(id(value))
        found.append(value)
    elif isinstance(value, Mapping):
        seen.add(id(value))
        for each in value.values():
            _collect(each, found, seen)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | range):
        seen.add(id(value))
        for each in value:
            _collect(each, found, seen)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def _copied(value: Any) -> Any:
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in tensors_in(value)}
    return copy.deepcopy(value, memo)


def _refuse_uncopyable(name: str, value: object, owner: str) -> None:
    try:
        _copied(value)
    except Exception as error:  # deepcopy raises whatever the value's own methods raise
        raise ConfigError(
            f"{owner}.{name} of type {type(value).__name__} cannot be copied ({error}); a commit could not keep it: "
            f"give {owner} values that can be copied and pickled, or objects with state_dict()"
        ) from error
