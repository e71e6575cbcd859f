"""What holds values of the script: how they are read, kept for a loop body that comes again, and brought back."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import CellType, FunctionType
from typing import Any

import torch
from torch.utils.data import Dataset

from farandole.integrations.torchrun.in_place.script_frames import set_locals
from farandole.integrations.torchrun.in_place.script_memory import read_context, read_memory, write_memory
from farandole.integrations.torchrun.in_place.script_places import ITERATORS, copied, is_iterator

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
LARGE = 20_000
"""A dictionary or a set with more values is not kept at each boundary."""
LONG_LIST = 256
"""Of a list with more items the last ones are kept, unless it is known that others change."""

_FEW, _LAST = 64, 16  # of a list with more items the last ones stand for all, as it grows with most steps
_MODULE_KEYS = frozenset(vars(torch.nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}

Values = dict[Any, Any]
"""By key. Of a longer list: the last items by place."""


class _Weakly(weakref.ref[Any]):
    """Refers to a result with a graph."""


class _Items(Values):
    """The last items of a list, with a copy of all; None: there are too many."""

    __slots__ = ("all",)

    def __init__(self, items: list[Any] | deque[Any], is_whole: bool) -> None:
        first = len(items) - _LAST
        is_kept = is_whole or len(items) <= LONG_LIST or isinstance(items, deque)
        self.all = _kept_items(items) if is_kept else None
        last = _kept_items(items[first:]) if self.all is None else self.all[first:]  # type: ignore[index]
        super().__init__(enumerate(last, first))


class Holder:
    """Something that holds values by key: variables of a function, or what it keeps from call to call; attributes of an
    object, a dictionary, a list. Other threads of the script may change it: each is copied at once, before it is looked
    at."""

    def __init__(self, path: str, target: Any, kind: str) -> None:
        self.path, self.target, self.kind = path, target, kind

    def read(self) -> dict[Any, Any]:
        """Return the values by key."""
        target = self.target
        if self.kind == "frame":
            return dict(target.f_locals)
        if self.kind == "object":
            return _attributes(target)
        if self.kind == "function":
            return kept_by(target)
        if self.kind == "data":  # plain values, as the stage of a curriculum; the samples may be many
            own = dict(vars(target)).items()
            return {key: value for key, value in own if type(value) in PLAIN or isinstance(value, Dataset)}
        if self.kind == "cell":
            return {"": target.cell_contents} if _is_filled(target) else {}
        if self.kind == "globals":
            return {key: value for key, value in dict(target).items() if not key.startswith("__")}
        if self.kind == "set":
            return {"": frozenset(target)}
        if self.kind == "memory":
            return {"": read_memory(target)}
        if self.kind == "context":
            return read_context(target)
        # Not dict(target): a class may construct what it is asked for, as that of transformers' activations does.
        return dict.copy(target) if self.kind == "dict" else dict(enumerate([*target]))

    def write(self, values: Mapping[Any, Any]) -> None:
        """Set some of the values."""
        target = self.target
        if self.kind == "frame":
            set_locals(target, values)
        elif self.kind == "object":
            for key, value in values.items():
                _set_attribute(target, key, value)
        elif self.kind in ("function", "data"):
            vars(target).update(values)
        elif self.kind == "cell":
            target.cell_contents = values[""]
        elif self.kind in ("dict", "globals"):
            if isinstance(target, Counter):
                dict.update(target, values)  # its own method adds
            else:
                target.update(values)
        elif self.kind == "memory":
            write_memory(target, values[""])
        elif self.kind == "context":
            target.set(values[""])
        elif self.kind == "set":
            target.clear()
            target.update(values[""])
        else:
            for place, value in values.items():
                if place < len(target):
                    target[place] = value
                else:
                    target.append(value)

    def keep(self, is_whole: bool = False) -> Values:
        """Return the values for restore(); without results that have a graph, which are computed anew in each body.
        `is_whole`: also of a very long list all items."""
        if self.kind == "list":
            items = self.target
            if len(items) > _FEW:
                return _Items(items, is_whole)
            return dict(enumerate(_kept_items(items)))
        values = self.read()
        if PLAIN.issuperset(map(type, values.values())):  # as of most layers of a model
            return values
        kept = {key: each for key, each in values.items() if not _is_passing(each)}
        return {key: copied(each) if is_iterator(each) else each for key, each in kept.items()}

    def has_changed(self, then: Values) -> bool:
        """Return whether the values are others than in an earlier keep()."""
        now = self.keep(is_whole=isinstance(then, _Items) and then.all is not None)
        if self.kind == "memory":
            return now != then
        if isinstance(then, _Items) and isinstance(now, _Items) and then.all is not None and now.all is not None:
            return not _are_same(now.all, then.all)
        return now.keys() != then.keys() or any(now[key] is not each for key, each in then.items())

    def has_grown(self, then: Values) -> bool:
        """Return whether a long list has become longer since an earlier keep(), and has not changed otherwise."""
        if not isinstance(then, _Items):
            return False
        known = then.all or [*then.values()]
        first = 0 if then.all else next(iter(then))
        return _are_same(_kept_items([*islice(self.target, first, first + len(known))]), known)

    def restore(self, values: Values) -> None:
        """Return to the values of an earlier keep().

        Raises:
            ValueError: A very long list has changed in another way than at its end.
        """
        if self.kind == "list":
            self._restore_items(values)
            return
        now = self.read()
        if self.kind == "dict":
            for key in now.keys() - values.keys():
                if not _is_passing(now[key]):
                    with contextlib.suppress(KeyError):  # another thread has removed it
                        del self.target[key]
        is_set = self.kind == "set"
        changed = values if is_set else {key: each for key, each in values.items() if now.get(key, now) is not each}
        if changed:
            self.write({key: copied(each) if is_iterator(each) else each for key, each in changed.items()})

    def _restore_items(self, values: Values) -> None:
        items, kept = self.target, [*values.values()]
        if isinstance(values, _Items):
            if values.all is None:
                first = next(iter(values))
                if not _are_same(_kept_items(items[first : first + len(kept)]), kept):
                    raise ValueError(
                        f"of more than {LONG_LIST} items the last {_LAST} are kept, and others have changed"
                    )
                del items[first + len(kept) :]
                return
            kept = values.all
        if not _are_same(_kept_items(items), kept):
            items.clear()
            if ITERATORS.union([_Weakly]).intersection(map(type, kept)):
                kept = [copied(each) if is_iterator(each) else each for each in _there(kept)]
            items.extend(kept)

    def name_of(self, key: Any) -> str:
        if self.kind in ("frame", "object", "globals", "function", "data"):
            return f"{self.path}.{key}" if self.path else str(key)
        return self.path if self.kind in ("cell", "memory", "context") else f"{self.path}[{key!r}]"


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, type):
        own = dict(vars(value)).items()
        return {key: each for key, each in own if not key.startswith("__") and not callable(each)}
    if isinstance(value, torch.nn.Module):
        return {key: each for key, each in dict(vars(value)).items() if key not in _MODULE_KEYS}
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def kept_by(function: FunctionType) -> dict[str, Any]:
    """Return what a function keeps from call to call: the variables around it, containers that are defaults of its
    arguments, and its attributes."""
    code, cells = function.__code__, function.__closure__ or ()
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    arguments = code.co_varnames[: code.co_argcount]
    by_name = {**dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)), **named}
    containers = {name: each for name, each in by_name.items() if isinstance(each, dict | list | set | deque)}
    return {**dict(zip(code.co_freevars, cells, strict=True)), **containers, **vars(function)}


def _set_attribute(target: Any, key: str, value: Any) -> None:
    if isinstance(target, type) or key not in getattr(target, "__dict__", ()):
        object.__setattr__(target, key, value) if not isinstance(target, type) else setattr(target, key, value)
    else:
        vars(target)[key] = value


def _kept_items(items: Collection[Any]) -> list[Any]:
    """Return the items of a list without what they would keep alive: results with a graph are referred to weakly, as
    the list is often emptied before the next ones are computed. In a long list the last ones show what it has."""
    kept = [*items]
    last = kept if len(kept) <= _FEW else kept[-_LAST:]
    if not PLAIN.issuperset(map(type, last)) and any(_is_passing(each) or is_iterator(each) for each in last):
        for place, each in enumerate(kept):
            if is_iterator(each):
                kept[place] = copied(each)
            elif _is_passing(each):
                kept[place] = _Weakly(each)
    return kept


def _there(kept: Iterable[Any]) -> Iterator[Any]:
    """Yield the items that are there still."""
    for each in kept:
        if type(each) is not _Weakly:
            yield each
        elif (item := each()) is not None:
            yield item


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_passing(value: Any) -> bool:
    """Return whether a value is a result with a graph: it is computed anew in each loop body, and may be large."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _are_same(some: Collection[object], others: Collection[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
