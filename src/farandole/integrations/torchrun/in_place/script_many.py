"""Containers and objects of the script of which there are too many to watch one by one: the lists of a history of
each sample, the objects in a long list.

They are copied together, by functions of C: some 50 ns for each. Of tensors among them only the writes are counted.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch

_MOST_AT_BOUNDARY = 8000  # some 0.4 ms; more are copied in a search only
_MOST = 100_000  # in one container; more are samples of a data set rather than what a loop body changes
_COPY: Mapping[type, Callable[[Any], Any]] = {list: list.copy, dict: dict.copy, set: set.copy, deque: deque.copy}
KINDS = _COPY.keys()
_COPIES = {**_COPY, np.ndarray: np.ndarray.copy}
_VERSION = operator.attrgetter("_version")


class Many:
    """Those in one long container.

    Args:
        path: Of the container.
        targets: Containers, dictionaries of attributes, and tensors.
        is_carried: Their values are carried over to a newcomer in another way.
    """

    def __init__(self, path: str, targets: Iterable[Any], is_carried: bool) -> None:
        self.path, self.is_carried = path, is_carried
        self._by_kind: dict[type, list[Any]] = {}
        for each in targets:
            self._by_kind.setdefault(type(each), []).append(each)
        self.count = sum(map(len, self._by_kind.values()))

    def keep(self) -> dict[type, list[Any]]:
        """Return their values."""
        return {kind: [*map(_COPIES.get(kind, _VERSION), those)] for kind, those in self._by_kind.items()}

    def changed(self, kept: Mapping[type, list[Any]]) -> list[tuple[Any, Any]]:
        """Return what has changed since keep(), with its value then."""
        pairs = (pair for kind, then in kept.items() for pair in zip(self._by_kind[kind], then, strict=True))
        return [(live, then) for live, then in pairs if not _is_same(live, then)]


class ManyContainers:
    """Those of a script."""

    def __init__(self) -> None:
        self._kept: list[tuple[Many, dict[type, list[Any]]]] = []
        self._is_late = self._is_old = False
        self._at_start: dict[str, tuple[Many, dict[type, list[Any]]]] = {}

    def watch(self, many: Iterable[Many]) -> None:
        """Watch these from now on, and remember their values."""
        self._kept = [(each, each.keep()) for each in many if each.count <= _MOST]
        for each, kept in self._kept:
            if not each.is_carried:
                self._at_start.setdefault(each.path, (each, kept))
        self._is_late, self._is_old = sum(each.count for each, _ in self._kept) > _MOST_AT_BOUNDARY, False

    def take(self) -> None:
        """Remember their values, at a boundary without a search."""
        self._is_old = self._is_late
        if not self._is_late:
            self._kept = [(each, each.keep()) for each, _ in self._kept]

    def put_back(self, known: Set[int]) -> list[str]:
        """Return to the values at the boundary. Returns the paths of what stays, or may stay, as it is.

        Args:
            known: id() of what is brought back in another way.
        """
        stay = []
        for many, kept in self._kept:
            changed = [pair for pair in many.changed(kept) if id(pair[0]) not in known]
            for live, then in () if self._is_old else changed:
                _restore(live, then)
            if changed and (self._is_old or any(isinstance(live, torch.Tensor) for live, _ in changed)):
                stay.append(many.path)
        return stay

    def changed(self) -> list[Many]:
        """Return those in which something has changed since they were remembered."""
        return [many for many, kept in self._kept if many.changed(kept)]

    def lacking(self) -> list[str]:
        """Return the paths of what has changed since the start, and is not carried over to a newcomer."""
        return [path for path, (many, kept) in self._at_start.items() if many.changed(kept)]


def bulk_of(values: Collection[Any], is_own: Callable[[type], bool]) -> list[Any]:
    """Return what can be copied together: containers, tensors, and the attributes of objects of the script."""
    kinds = set(map(type, values))
    own = {kind for kind in kinds if kind not in _COPY and is_own(kind) and not issubclass(kind, torch.nn.Module)}
    as_they_are = kinds & (_COPY.keys() | {torch.Tensor})
    if not own | as_they_are:
        return []
    attributes = [vars(each) for each in values if type(each) in own and hasattr(each, "__dict__")]
    return [*(each for each in values if type(each) in as_they_are), *attributes]


def _is_same(live: Any, then: Any) -> bool:
    if isinstance(live, torch.Tensor):
        return bool(live._version == then)
    if isinstance(live, np.ndarray):
        return bool(live.tobytes() == then.tobytes())
    if len(live) != len(then):
        return False
    if isinstance(live, dict):
        return all(map(operator.is_, live, then)) and all(map(operator.is_, live.values(), then.values()))
    return live == then if isinstance(live, set) else all(map(operator.is_, live, then))


def _restore(live: Any, then: Any) -> None:
    if isinstance(live, np.ndarray):
        live[...] = then
    elif isinstance(live, list | deque):
        live.clear()
        live.extend(then)
    elif isinstance(live, dict | set):
        live.clear()
        live.update(then)
