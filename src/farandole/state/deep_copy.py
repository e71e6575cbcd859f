"""Copies of nested values whose tensors may be filled in later. Commits are made of them."""

from __future__ import annotations

import copy
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
        sources = tensors_in(value)
        targets = [self._target(place, source) for place, source in enumerate(sources)]
        memo: dict[int, Any] = {id(source): target for source, target in zip(sources, targets, strict=True)}
        self._value = copy.deepcopy(value, memo)  # first, since it may raise
        self._targets = targets
        later = []
        for source, target in zip(sources, targets, strict=True):
            if is_later is not None and is_later(source):
                later.append((source.detach(), target))
            else:
                target.copy_(source.detach())
        return later

    def view(self) -> Any:
        """The value, with the snapshot's own tensors in it: only for those who copy out of them."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in self._targets}
        return copy.deepcopy(self._value, memo)

    def copy(self) -> Any:
        """The value; nothing in it is shared with the snapshot."""
        return copy.deepcopy(self._value)

    def _target(self, place: int, source: torch.Tensor) -> torch.Tensor:
        if place < len(self._targets):
            kept = self._targets[place]
            if _layout(kept) == _layout(source) and kept.device == self._device(source):
                return kept
        device = self._device(source)
        # Pinned, so that the device copies by itself, at its full speed.
        is_pinned = source.is_cuda and device.type == "cpu"
        return torch.empty_like(source, device=device, pin_memory=is_pinned, requires_grad=False)

    def _device(self, source: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self._is_on_host else source.device


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
