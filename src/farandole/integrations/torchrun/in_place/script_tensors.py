"""The bytes of the script's tensors, and what its loop bodies have made since the last search."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from farandole.integrations.torchrun.in_place.script_holder import PLAIN, Holder, Values
from farandole.integrations.torchrun.in_place.script_memory import is_same
from farandole.integrations.torchrun.in_place.script_search import (
    MOST_HOLDERS,
    SAMPLED_BYTES,
    Found,
    digest,
    holder_of,
)

_EMPTY = PLAIN | {torch.Tensor, torch.nn.Parameter}  # types that hold nothing
_MOST_ARRAYS = 200  # of NumPy, that are copied at each boundary; of more, see small_arrays()
_MOST_ARRAY = 256 << 20  # of one that is copied before the first loop body
_MOST_SMALL = 4 << 20  # of arrays of which there are many
_LOOKED_AT_BYTES = 16 << 20  # of an array that is looked at where a loop body comes again: some 5 ms
_MOST_LOOKED_AT = 64 << 20  # of all of them
_SMALL_BYTES = 64 << 10  # most of a tensor in an object that a loop body has made


class MadeObjects:
    """What loop bodies have made since the last search: objects that hold values, such as a meter. Most are made anew
    in each body, and go with it; others stay, and are watched from the second boundary on."""

    def __init__(self, owned: Set[int]) -> None:
        self._owned = owned  # id() of objects that are restored in another way
        self._made: list[tuple[Holder, Any, object, Found]] = []  # holder, key and value, what is in it
        self._staying: list[torch.Tensor] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values
        self._large_ones: list[tuple[str, torch.Tensor]] = []  # in what stays; these are not copied
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    def grown_up(self) -> list[Holder]:
        """Return the holders of what is still where it was at the last boundary."""
        stay = [found for holder, key, value, found in self._made if holder.read().get(key) is value]
        self._made = []
        self._staying += [each for found in stay for each in _small(found)]
        self._large_ones += [pair for found in stay for pair in _large(found)]
        return [holder for found in stay for holder, _ in found.copies]

    @torch.no_grad()
    def take(
        self, copies: Sequence[tuple[Holder, Values]], before: Mapping[int, Mapping[Any, Any]]
    ) -> list[tuple[Holder, Values]]:
        """Return the values of what is new in these holders, which had the values `before`, by id()."""
        self._tensors = [(each, each.detach().clone()) for each in self._staying]
        self._versions = [(name, each, _version(each)) for name, each in self._large_ones]
        new = [
            (holder, key, value)
            for holder, values in copies
            if (then := before.get(id(holder))) is not None
            and not (len(then) == len(values) and all(map(operator.is_, values.values(), then.values())))
            for key, value in values.items()
            if then.get(key) is not value and type(value) not in _EMPTY
        ]
        if not new or len(copies) + len(new) > MOST_HOLDERS:
            return []
        known = {id(holder.target) for holder, _ in copies} | self._owned
        taken: list[tuple[Holder, Values]] = []
        for holder, key, value in new:
            inner = None if id(value) in known else holder_of(holder.name_of(key), value)
            if inner is not None:
                found = Found([inner], known)
                known |= {id(each.target) for each, _ in found.copies}
                taken += found.copies
                self._made.append((holder, key, value, found))
                self._tensors += [(each, each.detach().clone()) for each in _small(found)]
                self._versions += [(name, each, _version(each)) for name, each in _large(found)]
        return taken

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Return the names of what stays as the loop body has left it."""
        for live, value in self._tensors:
            live.detach().copy_(value)
        return [name for name, each, version in self._versions if _version(each) != version]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int:
    """Return a number that is another one when autograd has counted a write, or the tensor has another memory."""
    return tensor._version + tensor.data_ptr()


def _small(found: Found) -> list[torch.Tensor]:
    return [each for each in found.memory().values() if each.nbytes <= _SMALL_BYTES]


def _large(found: Found) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in found.memory().items() if each.nbytes > _SMALL_BYTES]


class ScriptTensors:
    """The bytes of the script's tensors. Only tensors that the loop body is known to change are copied: before its
    step at each boundary, after it where the step is aborted."""

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self._digests: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._early: set[str] = set()
        self._late: set[str] = set()
        self._lasting: set[str] = set()
        self._is_learning = False
        self._has_learned = False  # from a whole loop body, here or on another worker
        self._copies: dict[str, torch.Tensor] = {}

    def lasting(self) -> set[str]:
        """Return the names of tensors of several elements that have changed between two searches, and are the same
        objects."""
        return self._lasting

    def known(self) -> tuple[list[str], list[str]]:
        """Return the names of the tensors that a loop body changes before its step, and after it."""
        return sorted(self._early), sorted(self._late)

    def know(self, names: Sequence[Sequence[str]]) -> None:
        """Take over the known() of another worker: the first loop body of this one may be aborted."""
        self._early |= set(names[0])
        self._late = (self._late | set(names[1])) - self._early
        self._has_learned = True

    def learn(self, tensors: Mapping[str, torch.Tensor], digests: Mapping[str, int]) -> None:
        """Watch these tensors from now on, and find out what the next loop body changes."""
        self._has_learned |= bool(self._live)
        arrays = {name for name, each in tensors.items() if hasattr(each, "_array")}
        small = {name for name in arrays if tensors[name].nbytes <= SAMPLED_BYTES}
        digests = {**digests, **{name: digest(tensors[name]) for name in small}}
        same = {name for name, each in tensors.items() if is_same(self._live.get(name), each)}
        # autograd counts no writes to an array: those that are cheap to copy may always be written.
        if len(arrays) <= _MOST_ARRAYS:
            self._early |= {name for name in arrays if tensors[name].nbytes <= _SMALL_BYTES}
        changed = {name for name in same if self._digests[name] != digests[name]}
        self._lasting |= {name for name in changed if tensors[name].numel() > 1}
        self._early |= (changed & arrays) - small
        self._late |= changed - self._early
        self._live, self._digests = dict(tensors), {name: digests[name] for name in tensors}
        self._is_learning = True
        self._copy()

    def take(self) -> None:
        """Remember the tensors, at a boundary."""
        self._late |= self._written() - self._early
        self._is_learning, self._has_learned = False, True
        self._copy()

    def look(self) -> None:
        self._early |= self._written()
        if self._is_learning:
            self._early |= {
                name
                for name, each in self._live.items()
                if each.nbytes <= SAMPLED_BYTES and digest(each) != self._digests[name]
            }

    @torch.no_grad()
    def save(self) -> None:
        written = self._written()
        for name in self._late - self._early - self._copies.keys():
            if name in self._live and name not in written:
                self._copies[name] = self._live[name].detach().clone()

    def small_arrays(self) -> list[Any]:
        """Return arrays that are not copied here, as there are many of them."""
        arrays = [
            (name, array) for name, each in self._live.items() if (array := getattr(each, "_array", None)) is not None
        ]
        found = [each for name, each in arrays if name not in self._early and each.nbytes <= _SMALL_BYTES]
        return found if sum(each.nbytes for each in found) <= _MOST_SMALL else []

    @torch.no_grad()
    def put_back(self, owned: Callable[[], Iterable[object]]) -> list[str]:
        """Return the names of what stays: tensors that were written without a copy, and arrays without one that are
        others than in the last search. `owned`: what is restored in another way, as are views of it."""
        written = sorted(self._written() - self._copies.keys())
        if written:
            tensors = (each for each in owned() if isinstance(each, torch.Tensor) and each.layout is torch.strided)
            restored = set(map(_memory, tensors))
            written = [name for name in written if _memory(self._live[name]) not in restored]
        for name, copy in self._copies.items():
            self._live[name].detach().copy_(copy)
        self._versions = {name: _version(each) for name, each in self._live.items()}
        left, others, known = _MOST_LOOKED_AT, list[str](), self._copies.keys() | self._late
        for name, each in self._live.items():
            if name not in known and hasattr(each, "_array") and _SMALL_BYTES < each.nbytes <= _LOOKED_AT_BYTES:
                left -= each.nbytes
                if left >= 0 and digest(each) != self._digests[name]:
                    others.append(name)
        return [*written, *others]

    @torch.no_grad()
    def _copy(self) -> None:
        self._versions = {name: _version(each) for name, each in self._live.items()}
        if self._has_learned:
            names = self._early & self._live.keys()
        else:  # the first loop body of the job may change any of them
            most = {True: _MOST_ARRAY, False: SAMPLED_BYTES}  # an array's writes are not counted
            names = {name for name, each in self._live.items() if each.nbytes <= most[hasattr(each, "_array")]}
        self._copies = {name: self._live[name].detach().clone() for name in names}

    def _written(self) -> set[str]:
        return {name for name, each in self._live.items() if _version(each) != self._versions[name]}
