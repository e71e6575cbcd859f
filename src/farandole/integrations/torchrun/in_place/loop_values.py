"""What the loop of an elastic function keeps outside of its TorchState: variables of its functions and of the script,
their objects, and the tensors in them.

    a rehearsal    leaves no trace: values are copied before each of its loop bodies, and brought back behind it
    a boundary     the functions' variables are remembered, and the small values that a rehearsal was seen to change
    a fault        they are brought back, also the count of enumerate(); larger tensors keep what the body has done, and
                   the last line of the job names them

The search is that of scripts in place (script_search.py), but for objects of installed packages: they may belong to
threads and files. Nothing is carried over to a newcomer.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from farandole.integrations.torchrun.in_place.loop_shape import COLLECTS, line_that_collects
from farandole.integrations.torchrun.in_place.script_holder import LARGE, Holder, Values
from farandole.integrations.torchrun.in_place.script_iterators import NAMES, are_counted, shift_counts
from farandole.integrations.torchrun.in_place.script_many import Many, ManyContainers
from farandole.integrations.torchrun.in_place.script_places import (
    copied,
    generators_of_process,
    is_iterator,
    place_of,
    set_state,
    state_of,
)
from farandole.integrations.torchrun.in_place.script_search import (
    Found,
    digest,
    is_of_own_module,
    roots_of_script,
    some,
)
from farandole.training.collectives import world
from farandole.training.state.step_state import StepState
from farandole.training.state.watched_tensors import are_equal

logger = logging.getLogger("farandole")

_SMALL_BYTES = 64 << 10  # of a tensor that is copied at each boundary
_REHEARSED_BYTES = 16 << 20  # of all tensors that are copied before each loop body of a rehearsal, with a small model
_TWICE = "what a loop body did that came again is done twice in it"
_OWN = "a newcomer has its own"
_COUNTS = (
    "what the loop takes its batches with, as zip() or itertools, goes on where a batch comes again, and so do the "
    "values beside the batches: write `for number, batch in enumerate(loader)`"
)
_FARANDOLE, _TORCH = (f"{Path(sys.modules[name].__file__ or '').parent}/" for name in ("farandole", "torch"))

Copies = list[tuple[Holder, Values]]


class LoopValues:
    """The values of one elastic function."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._before: _Everything | None = None  # at the beginning of a rehearsal's loop body
        self._has_seen_body = self._is_counted = False
        self._watched: list[Holder] = []  # what such a body has changed
        self._whole: set[int] = set()  # id() of these, if they are long lists that have not only grown
        self._changing: dict[str, torch.Tensor] = {}  # tensors that it has changed, by name
        self._variables: list[tuple[FrameType, dict[str, Any]]] = []
        self._drawn: dict[int, Any] = {}  # generators of random numbers that go on in it, by id()
        self._copies: Copies = []  # of the watched
        self._many = ManyContainers()  # in long ones: those that such a body has changed
        self._groups: dict[str, Many] = {}  # what is watched in these
        self._states: list[tuple[Any, Any]] = []  # of the drawn
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values
        roots_of_script()  # the first search takes up to 10 ms: nobody waits for this worker yet

    def begin_trial(self) -> None:
        """Remember everything, before a loop body of a rehearsal."""
        self._before = _Everything(self._state)

    def take(self) -> None:
        """Remember, at a boundary, what changes."""
        if self._has_seen_body:
            self._variables = [(each, _variables_of(each)) for each in _frames_of_loop()]
            self._copies = [(each, each.keep(id(each) in self._whole)) for each in self._watched if not _is_large(each)]
            self._states = [(each, state_of(each)) for each in self._drawn.values()]
            self._many.take()
            small = (each for each in self._changing.values() if each.nbytes <= _SMALL_BYTES)
            self._tensors = [(each, each.detach().clone()) for each in small]

    def roll_back(self) -> None:
        """Return to begin_trial(), or take(): the loop body comes again."""
        before, self._before = self._before, None
        loader = self._state.loader
        if before is not None:
            self._is_counted = are_counted([loader], loader.elder) if not self._has_seen_body else self._is_counted
            self._learn(before)
            self._name(before.bring_back(), _TWICE)
            self._many.watch(self._groups.values())
        elif self._has_seen_body:
            variables = [(Holder("", frame, "frame"), values) for frame, values in self._variables]
            stay = _restore([*variables, *self._copies], self._tensors, self._states)
            stay += self._many.put_back(known=frozenset())
            stay += [each.path for each in self._watched if _is_large(each)]
            stay += [name for name, each in self._changing.items() if each.nbytes > _SMALL_BYTES]
            self._name(stay, _TWICE)
        is_counted = self._is_counted or _names_a_count()  # it takes time to find the counts
        if is_counted and not shift_counts(-1, [loader], loader.elder):
            world.remark("count of batches", _COUNTS)
        if line := line_that_collects():
            world.remark("collected batches", f"{line}: {COLLECTS}")

    def note_newcomer(self) -> None:
        """Say in the last line of the job what a newcomer has not."""
        self._name((name for name, each in self._changing.items() if each.numel() > 1), _OWN)

    def changing(self) -> str:
        """Return the names of the tensors that a loop body changes; empty: none is known."""
        return some(_first_parts(self._changing))

    def draws(self) -> bool:
        """Return whether generators of the loop have gone on since begin_trial()."""
        return self._before is not None and any(True for _ in self._before.drawn())

    def forget(self) -> None:
        """Keep nothing of the loop alive: it has ended."""
        self._before, self._variables, self._copies, self._tensors, self._states = None, [], [], [], []
        self._many, self._groups = ManyContainers(), {}

    def _name(self, names: Iterable[str], so_that: str) -> None:
        if parts := _first_parts(names):
            text = f"the loop body changes {', '.join(parts)}, which is in no TorchState: {so_that}"
            world.remark(so_that, f"{text}; write TorchState(..., {parts[0]}={parts[0]})")

    def _learn(self, before: _Everything) -> None:
        """Notice what the loop body has changed."""
        self._has_seen_body = True
        known = {id(each.target) for each in self._watched}
        for holder, then in before.copies:
            if holder.kind != "frame" and id(holder.target) not in known and holder.has_changed(then):
                self._watched.append(holder)
                if holder.kind == "list" and len(holder.target) <= LARGE and not holder.has_grown(then):
                    self._whole.add(id(holder))
        self._groups.update((each.path, each) for each in before.many.changed())
        self._changing.update(before.changed())
        self._drawn.update((id(each), each) for each in before.drawn())


class _Everything:
    """All values at the beginning of a loop body. Tensors are copied as far as they need no more memory than the
    parameters twice: a rehearsal has copies of these, too."""

    def __init__(self, state: StepState) -> None:
        of_process = generators_of_process()
        roots = [each for each in roots_of_script() if each.kind == "globals"]
        owned = {id(each) for each in (*_owned_by(state), of_process, *vars(of_process).values())}
        frames = [Holder(f"{each.f_code.co_qualname}()", each, "frame") for each in _frames_of_loop()]
        found = Found([*roots, *frames], owned)
        foreign = tuple(each.path for each in found.holders.values() if _is_foreign(each))
        inside = tuple(f"{path}{mark}" for path in foreign for mark in (".", "["))
        copies = [*found.copies, *found.long]
        self.copies = [each for each in copies if each[0].path not in foreign and not each[0].path.startswith(inside)]
        self.many = ManyContainers()
        self.many.watch(each for each in found.many if each.path not in foreign and not each.path.startswith(inside))
        live = {name: each for name, each in found.memory().items() if not name.startswith(inside)}
        most = max(_REHEARSED_BYTES, 2 * sum(each.nbytes for module in state.modules() for each in module.parameters()))
        limit = most if sum(each.nbytes for each in live.values()) <= most else _SMALL_BYTES
        small = {name: each for name, each in live.items() if each.nbytes <= limit}
        self._tensors = {name: (each, each.detach().clone()) for name, each in small.items()}
        self._arrays = {name for name, each in small.items() if hasattr(each, "_array")}
        self._marks = {name: (each, _mark_of(each)) for name, each in live.items() if name not in self._arrays}
        self._randoms = [(each, state_of(each), place_of(each)) for each in found.randoms]

    def changed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that were written. Their values may be the same: an average of equal weights."""
        yield from self._marked()
        arrays = ((name, *self._tensors[name]) for name in self._arrays)
        yield from ((name, live) for name, live, value in arrays if not are_equal(live, value))

    def _marked(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of them that have another mark."""
        return ((name, live) for name, (live, mark) in self._marks.items() if _mark_of(live) != mark)

    def bring_back(self) -> list[str]:
        """Return the names of what stays as it is."""
        stay = _restore(self.copies, self._tensors.values(), [each[:2] for each in self._randoms])
        large = [name for name, _ in self._marked() if name not in self._tensors]
        return [*stay, *self.many.put_back(known=frozenset()), *large]

    def drawn(self) -> Iterator[Any]:
        """Yield the generators of random numbers that have gone on."""
        return (each for each, _, place in self._randoms if place_of(each) != place)


def _frames_of_loop() -> list[FrameType]:
    """Return the running functions from the elastic one to the loop over its batches."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FARANDOLE):
        frame = frame.f_back
    found = []
    while frame is not None and not (file := frame.f_code.co_filename).startswith(_FARANDOLE):
        if not file.startswith(_TORCH) and frame.f_code.co_name != "<module>":
            found.append(frame)
        frame = frame.f_back
    return found


def _names_a_count() -> bool:
    """Return whether a running function of the loop names enumerate(), or what counts as it does."""
    return any(name in NAMES for frame in _frames_of_loop() for name in frame.f_code.co_names)


def _variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a function, but for results with a graph: they are computed anew in each loop body."""
    return {
        key: copied(each) if is_iterator(each) else each
        for key, each in frame.f_locals.items()
        if type(each) is not torch.Tensor or each.grad_fn is None
    }


def _owned_by(state: StepState) -> Iterator[object]:
    """Yield what is restored in another way."""
    yield state
    yield from vars(state).values()
    yield from state.optimizers()
    for module in state.modules():
        yield from module.modules()
        yield from module.parameters()
        yield from module.buffers()


def _is_foreign(holder: Holder) -> bool:
    """Return whether it is an object of an installed package, which may belong to a thread or a file."""
    kind = type(holder.target)
    return holder.kind == "object" and not issubclass(kind, torch.nn.Module | type) and not is_of_own_module(kind)


@torch.no_grad()
def _restore(
    copies: Copies, tensors: Iterable[tuple[torch.Tensor, torch.Tensor]], states: Iterable[tuple[Any, Any]]
) -> list[str]:
    """Return the paths of what stays as it is."""
    stay = list[str]()
    for holder, values in copies:
        try:
            holder.restore(values)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            logger.warning("%s has changed in a loop body that comes again, and stays so: %s", holder.path, error)
            stay.append(holder.path)
    for live, value in tensors:
        live.detach().copy_(value)
    for generator, state in states:
        set_state(generator, state)
    return stay


def _is_large(holder: Holder) -> bool:
    return isinstance(holder.target, dict | set) and len(holder.target) > LARGE


def _is_of_no_module(name: str) -> bool:
    return "._parameters[" not in name and "._buffers[" not in name


def _mark_of(tensor: torch.Tensor) -> int:
    """Return a number that is another one when the tensor has been written; autograd counts no writes to an array, and
    none in inference mode."""
    return digest(tensor) if hasattr(tensor, "_array") or tensor.is_inference() else tensor._version


def _first_parts(names: Iterable[str]) -> list[str]:
    """Return the variables in which these values are, each once; those of modules first."""
    inside = (name.rpartition("().")[2] for name in sorted(names, key=_is_of_no_module))
    return list(dict.fromkeys(re.split(r"[.\[]", each, maxsplit=1)[0] for each in inside))
