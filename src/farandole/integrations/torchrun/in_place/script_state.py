"""What only the script knows: the variables of its functions, their objects, and the tensors in them.

    boundary        everything that holds values is copied, so that a loop body that comes again begins as it began
    some boundaries all workers compare what has changed since the start: what differs is each worker's own
    regroup         a newcomer, or a worker that is behind, receives what has changed and is the same on all workers

Nothing is chosen by its type: a value belongs to the training if the script has changed it, and all workers have
changed it alike. docs/decisions/elastic-in-place.md.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from farandole.integrations.torchrun.in_place.loop_shape import COLLECTS, line_that_collects
from farandole.integrations.torchrun.in_place.script_holder import LARGE, LONG_LIST, Holder, Values
from farandole.integrations.torchrun.in_place.script_iterators import shift_counts
from farandole.integrations.torchrun.in_place.script_many import KINDS, Many, ManyContainers
from farandole.integrations.torchrun.in_place.script_memory import size_of
from farandole.integrations.torchrun.in_place.script_places import Place, mark_of, moved, place_of, set_state, state_of
from farandole.integrations.torchrun.in_place.script_search import (
    MOST_HOLDERS,
    SAMPLED_BYTES,
    Digests,
    Found,
    digest,
    is_object_of_values,
    roots_of_script,
    some,
)
from farandole.integrations.torchrun.in_place.script_tensors import MadeObjects, ScriptTensors
from farandole.training.collectives import world
from farandole.training.state.packed_metadata import load_value

logger = logging.getLogger("farandole")

_TOO_MANY = "of so many values not all are kept for each step"
_OF_MODULE = ("._parameters", "._buffers", "._modules")  # dictionaries that torch changes
_SELDOM_CHANGING = (torch.nn.Module, dict, list)


class ScriptState:
    """The values of the script that are in no TorchState.

    Args:
        owned: Returns the objects that are restored and carried in another way.
        roots: Returns where to search.

    Attributes:
        batches: The number of batches that the script has in this iteration, as its enumerate() counts them.
        iteration: The number of the iteration for which torch would have drawn the seed of its loader processes.
        of_first: Names of what only the worker of rank 0 has changed, or has another value of in a module.
        going_on: Generators of Python that go on in the loop body, by name: they can be neither brought back nor
            carried.
    """

    def __init__(
        self, owned: Callable[[], Iterable[object]], roots: Callable[[], list[Holder]] = roots_of_script
    ) -> None:
        self._owned, self._roots = owned, roots
        self.batches = 0
        self.iteration = -1
        self._batches_then = 0
        self._of: list[object] = []  # where the search began
        self._lasting: set[str] = set()  # paths of functions that go on from one iteration over the batches to the next
        self._copies: list[tuple[Holder, Values]] = []
        self._watched: list[Holder] = []
        self._large: list[tuple[Holder, int, Values]] = []  # not watched: long; with length, and values at a search
        self._lists: list[tuple[Holder, int, int]] = []  # very long ones, with length and digest in the last search
        self._whole_lists: set[int] = set()  # id() of those that change otherwise, of which all items are copied
        self._whole: set[int] = set()  # id() of their holders
        self._learns_from: list[tuple[Holder, Values]] = []  # all of many holders, for one loop body
        self._changing: set[str] = set()  # paths of those that loop bodies have changed
        self._made = MadeObjects(frozenset())
        self._digests = Digests()
        self._many = ManyContainers()
        self._staying: dict[str, list[str]] = {}  # names of what was not brought back, by the reason
        self._last: dict[str, int] | None = None  # digests of the last search
        self._changed: set[str] = set()  # names of what has changed since the start
        self._unequal: set[str] = set()  # of these, what has differed between workers
        self._tensors = ScriptTensors()
        self._randoms: list[tuple[Any, Any]] = []  # with their states
        self._generators: dict[str, tuple[GeneratorType[Any, Any, Any], object]] = {}
        self._has_gone_on: set[str] = set()  # of these, in a loop body that came again
        self.going_on: set[str] = set()  # of these, in a loop body
        self.of_first: set[str] = set()
        self._has_begun = False
        self._alone: set[str] = set()  # of these, what no other worker has changed

    # A loop body that comes again ---------------------------------------------------------------------------

    def take(self, is_due: bool) -> None:
        """Remember everything, at a boundary; search anew where it is due, or the functions are others."""
        self.going_on |= {name for name, (each, mark) in self._generators.items() if _has_moved(each, mark)}
        roots = self._roots()
        of = [each.target for each in roots]
        if self.batches < self._batches_then:  # another iteration
            then = set(map(id, self._of))
            self._lasting |= {each.path for each in roots if id(each.target) in then}
        if is_due or len(of) != len(self._of) or any(one is not other for one, other in zip(of, self._of, strict=True)):
            self._of = of
            self._search(roots)
        else:
            self._watched += self._made.grown_up()
            self._watch_changed()
            before = {id(each): values for each, values in self._copies}
            self._copies = [(each, each.keep(id(each) in self._whole)) for each in self._watched]
            self._large = [(each, _length(each), then) for each, _, then in self._large]
            self._copies += self._made.take(self._copies, before)
            self._tensors.take()
            self._many.take()
            self._take_places([each for each, _ in self._randoms], {n: g for n, (g, _) in self._generators.items()})
        self._batches_then = self.batches

    def roll_back(self, has_left: bool = False) -> None:
        """Return to the last take(). `has_left`: the script has left the loop meanwhile, and its variables are those of
        the code behind it; only tensors and random numbers return."""
        for holder, values in () if has_left else self._copies:
            try:
                holder.restore(values)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                self._name(str(error), [holder.path])
        kept = {id(each) for each, _ in self._copies}
        for holder, count, then in () if has_left else self._large:
            is_other = _length(holder) != count or self._is_changing(holder) or holder.has_changed(then)
            if is_other and id(holder) not in kept:
                self._name(_TOO_MANY, [holder.path])
        for holder, count, mark in () if has_left else self._lists:
            if id(holder) not in self._whole and digest(holder.target[:count]) != mark:
                self._name(_TOO_MANY, [holder.path])
        known = {id(each.target) for each, _ in self._copies}
        self._name(_TOO_MANY, () if has_left else self._many.put_back(known))
        self._name("tensors that are not known to change are not copied", self._tensors.put_back(self._owned))
        self._name("a loop body has made it, and it is too large to be copied", self._made.put_back())
        for each, state in self._randoms:
            set_state(each, state)
        if has_left:
            return
        self._has_gone_on |= {name for name, (each, mark) in self._generators.items() if _has_moved(each, mark)}
        self.set_batches(self._batches_then)
        if line := line_that_collects():
            world.current().on_remark("collected batches", f"{line}: {COLLECTS}")

    def _name(self, why: str, paths: Iterable[str]) -> None:
        """Say in the last line of the job what has changed in a loop body that comes again, and stays so."""
        if paths := [*paths]:
            names = self._staying.setdefault(why, [])
            names += [each for each in paths if each not in names]
            text = f"what a loop body that came again has changed in the script stays so in {some(names)}: {why}"
            world.current().on_remark(f"values: {why}", text)

    def begin_anew(self, kept: Set[str]) -> None:
        """Return to the first call: before each iteration that a newcomer passes over. What it computes there is not
        what the others have computed, and must not add up: a script that counts epochs without progress would end.
        `kept`: names of variables that go on, those of loops."""
        if not self._has_begun:
            self._has_begun = True
            self.take(is_due=True)
            return
        self._copies = [
            (each, {key: value for key, value in values.items() if each.name_of(key) not in kept})
            if each.kind != "list"
            else (each, values)
            for each, values in self._copies
        ]
        self.roll_back()

    def _take_places(self, randoms: Sequence[Any], generators: Mapping[str, GeneratorType[Any, Any, Any]]) -> None:
        self._randoms = [(each, state_of(each)) for each in randoms]
        self._generators = {name: (each, mark_of(each)) for name, each in generators.items()}

    def take_gone_on(self) -> list[str]:
        """Return the names of the generators that have gone on in a loop body that came again, since the last call:
        they cannot be brought back."""
        gone_on, self._has_gone_on = sorted(self._has_gone_on), set()
        return gone_on

    def look(self) -> None:
        """Notice which tensors the loop body has changed before its step."""
        self._tensors.look()

    def save(self) -> None:
        """Copy the tensors that the rest of the loop body changes: its step is aborted."""
        self._tensors.save()

    def set_batches(self, batches: int) -> None:
        """Let enumerate() go on from another number of batches."""
        if batches != self.batches and not shift_counts(batches - self.batches):
            text = (
                f"zip() or itertools around the batches goes on from {self.batches} instead of {batches}, and what "
                f"comes beside them is another one"
            )
            world.current().on_remark("count of batches", text)
        self.batches = batches

    def _search(self, roots: list[Holder], is_quick: bool = False) -> Found:
        """`is_quick`: other workers wait for this one."""
        self._watch_changed()
        owned = set(map(id, self._owned()))
        found, self._made = Found(roots, owned), MadeObjects(owned)
        self._copies = [*found.copies, *found.long]
        self._watched = [each for each, _ in found.copies]
        if len(found.copies) > MOST_HOLDERS:
            self._watched = [each for each in self._watched if self._is_watched(each)]
            self._learns_from = found.copies
        digests = {
            name: self._digests.of(name, value, is_quick and name not in self._changed)
            for name, (_, _, value) in found.entries.items()
        }
        if self._last is not None:
            self._changed |= {name for name, each in digests.items() if self._last.get(name) != each}
        self._last = digests
        long = [each for each, _ in found.long]
        kept = [each for each in long if self._is_changing(each) and (each.kind == "memory" or _length(each) <= LARGE)]
        self._watched += kept
        self._large = [(each, _length(each), then) for each, then in found.long if each not in kept]
        lists = [(each.path, each) for each in self._watched if each.kind == "list" and len(each.target) > LONG_LIST]
        changed = [each for each in self._lists if each[0].path in self._changed]
        others = {id(each.target) for each, count, mark in changed if digest(each.target[:count]) != mark}
        self._whole_lists |= others  # they have not only grown since the last search
        self._whole = {id(each) for _, each in lists if id(each.target) in self._whole_lists}
        self._lists = [(each, len(each.target), digests[path]) for path, each in lists if path in digests]
        self._tensors.learn(found.memory(), digests)
        watched = set(map(id, self._watched))
        unwatched = [each for each, _ in found.copies if id(each) not in watched and each.kind in ("dict", "list")]
        rest = [each.target for each in unwatched if type(each.target) in KINDS and not each.path.endswith(_OF_MODULE)]
        rest += self._tensors.small_arrays()
        self._many.watch([*found.many, Many("a container or an array, one of many,", rest, is_carried=True)])
        self._take_places(found.randoms, found.generators)
        return found

    def _is_watched(self, holder: Holder) -> bool:
        """Return whether a holder of many is copied at each boundary: its values have changed, or often change."""
        often_changes = holder.kind in ("frame", "globals") or not isinstance(holder.target, _SELDOM_CHANGING)
        return often_changes or holder.path in self._changing

    def _is_changing(self, holder: Holder) -> bool:
        """Return whether values of a long dictionary or set have changed since the start."""
        return any(holder.path.startswith(name) for name in self._changed)

    def _watch_changed(self) -> None:
        """Watch, from now on, those of many holders that the loop body after the last search has changed."""
        learns_from, self._learns_from = self._learns_from, []
        watched = set(map(id, self._watched)) if learns_from else set()
        for holder, then in learns_from:
            if id(holder) not in watched and holder.has_changed(then):
                self._changing.add(holder.path)
                self._watched.append(holder)

    # Between workers ----------------------------------------------------------------------------------------

    def changed(self) -> dict[str, int]:
        """Return the digests of what has changed since the start, as far as it may be the same on all workers."""
        digests = self._last or {}
        return {name: digests[name] for name in self._changed - self._unequal if name in digests}

    def compare(self, tables: Sequence[Mapping[str, int]]) -> None:
        """Note what differs between workers: the changed() of each."""
        for name in set().union(*tables):
            if len({table.get(name) for table in tables}) > 1:
                self._unequal.add(name)
                is_alone = not any(name in table for table in tables[1:])
                if is_alone or _is_of_module(name):
                    self.of_first.add(name)
                if is_alone:
                    self._alone.add(name)
                else:
                    self._alone.discard(name)

    def own(self) -> list[str]:
        """Return the names of tensors that stay from step to step, and differ between workers: a queue of features.
        What only rank 0 has, such as a checkpoint that it saves, is not gone with another worker."""
        names = (self._unequal & self._tensors.lasting()) - self._alone
        return [name for name in names if not _is_statistic(name)]

    def sums(self, dtype: torch.dtype) -> set[float]:
        """Return the numbers in objects of values that differ between workers, as in a tensor of this type."""
        objects = [each for each in self._watched if is_object_of_values(each)]
        values = [
            value
            for each in objects
            for key, value in each.read().items()
            if type(value) is float and value and each.name_of(key) in self._unequal
        ]
        return set(torch.tensor(values, dtype=torch.float64, device="cpu").to(dtype).double().tolist())

    def digests_of_tensors(self) -> dict[str, int]:
        """Return the digests of tensors of real numbers, by name."""
        tensors = Found(self._roots(), set(map(id, self._owned()))).tensors()
        return {name: digest(each) for name, each in tensors.items() if each.is_floating_point()}

    def pack(self) -> dict[str, Any]:
        """Return what other workers need: the values themselves, not copies."""
        roots = self._roots()
        found = self._search(roots, is_quick=True)
        meters = _meters(roots, found, self._unequal, self._lasting)
        # An average of weights whose start differed between workers is better than its start, which a newcomer has.
        carried = self._changed - {name for name in self._unequal if not _is_of_module(name)}
        names = [name for name, (holder, *_) in found.entries.items() if name in carried and id(holder) not in meters]
        entries = []
        for name in names:
            holder, key, value = found.entries[name]
            sent = value.detach() if isinstance(value, torch.Tensor) else place_of(value) or value
            entries.append((name, holder.path, key, sent))
        tensors, lacking = self._tensors.known(), self._many.lacking()
        counts = {"lacking": lacking, "batches": self.batches, "iteration": self.iteration}
        return {"entries": entries, "unequal": sorted(self._unequal), "tensors": tensors, **counts}

    def other_place(self, packed: Mapping[str, Any], names: Set[str]) -> str:
        """Return which of these numbers is another one here than where it was packed: a clause; empty: none."""
        holders = Found(self._roots(), set(map(id, self._owned()))).holders
        for name, path, key, value in packed["entries"]:
            live = holders[path].read().get(key) if path in holders else None
            if name in names and type(live) is type(value) is int and live != value:
                return f"{name} is {live} instead of {value}"
        return ""

    def apply(self, packed: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Load what another worker has packed where this one is. Returns the names of what was loaded, and of what has
        no place here."""
        found = Found(self._roots(), set(map(id, self._owned())))
        loaded, missing = [], []
        for name, path, key, value in packed["entries"]:
            holder = found.holders.get(path)
            if holder is None or (holder.kind == "tuple" and name not in found.entries):
                missing.append(name)
                continue
            live = found.entries[name][2] if name in found.entries else holder.read().get(key)
            is_sampled = getattr(value, "nbytes", 0) > SAMPLED_BYTES
            is_alike = not is_sampled and isinstance(live, torch.Tensor) == isinstance(value, torch.Tensor)
            if is_alike and digest(live) == digest(value):
                continue
            try:
                _load(holder, key, live, value)
            except TypeError:
                missing.append(name)
            else:
                loaded.append(name)
        missing += packed["lacking"]
        self.set_batches(packed["batches"])
        self.iteration = packed["iteration"]
        self._unequal |= set(packed["unequal"])
        self._changed |= {name for name, *_ in packed["entries"]} | self._unequal
        self._copies, self._last = [], None
        self._tensors.know(packed["tensors"])
        self._search(self._roots(), is_quick=True)
        return loaded, missing


def _meters(roots: Sequence[Holder], found: Found, unequal: Set[str], lasting: Set[str]) -> set[int]:
    """Return the id() of holders that go with their worker as a whole: a meter has a sum, which differs, and a count,
    which does not; a newcomer with the count of the others and a sum of its own would have a wrong mean. They are
    objects of values only, at least one of which differs, and there are several of a kind, or the function around the
    batches has made them, which is called for each epoch, as far as is known."""
    frames = [each.path for each in roots if each.kind == "frame"]
    inner = f"{frames[-1]}." if frames and frames[-1] not in lasting else None
    leaves = [each for each in found.holders.values() if is_object_of_values(each)]
    kinds = Counter(type(each.target) for each in leaves)
    return {
        id(each)
        for each in leaves
        if (kinds[type(each.target)] > 1 or (inner is not None and each.path.startswith(inner)))
        and not unequal.isdisjoint(map(each.name_of, each.read()))
    }


def _length(holder: Holder) -> int:
    return size_of(holder.target) if holder.kind == "memory" else len(holder.target)


def _is_of_module(name: str) -> bool:
    """Return whether a value is a parameter or a buffer of a module, and no statistic of a worker's own samples."""
    return ("._parameters[" in name or "._buffers[" in name) and not _is_statistic(name)


def _is_statistic(name: str) -> bool:
    return name.endswith(("['running_mean']", "['running_var']", "['num_batches_tracked']"))


def _has_moved(generator: GeneratorType[Any, Any, Any], mark: object) -> bool:
    return mark is not None and mark_of(generator) != mark


@torch.no_grad()
def _load(holder: Holder, key: Any, live: Any, value: Any) -> None:
    if isinstance(value, Place):
        there = moved(live, value)
        if there is not live:
            holder.write({key: there})
        return
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
            live.detach().copy_(value)
            return
        made = value.to(live.device) if isinstance(live, torch.Tensor) else value
        is_parameter = isinstance(live, torch.nn.Parameter)
        holder.write({key: torch.nn.Parameter(made, live.requires_grad) if is_parameter else made})
    elif isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and live.shape == value.shape:
        live[...] = value
    elif isinstance(value, deque) and isinstance(live, deque):
        live.clear()
        live.extend(value)
    else:
        loaded = load_value(live, value)
        if loaded is not live:
            holder.write({key: loaded})
