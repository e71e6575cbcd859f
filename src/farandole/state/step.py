"""The step that is open right now: loader, optimizer and run loop meet here. Main thread only.

    none ── open() ──► open ── reduced() ──► reduced ── decided() ──► decided
                         └───── aborted() ─────┴──────► aborted

The loader opens it with a batch, the optimizer reduces and applies, and whoever sees a fault aborts it. A rehearsal is
aborted from the beginning: the loop body runs, and nothing comes of it. With several
optimizers (a GAN) they reduce and apply one after the other; the step is decided when the last of them has stepped, or
when the loop body ends without the others (a generator that steps for every fifth batch); until then it can be undone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from farandole import status_reporting
from farandole.errors import StepError
from farandole.state import recording
from farandole.state.global_batch import Batch


class Phase(enum.StrEnum):
    NONE = "none"  # no batch was handed out
    OPEN = "open"  # a batch was handed out; its gradients are not reduced yet
    REDUCED = "reduced"  # every gradient of the global batch is here
    ABORTED = "aborted"  # a fault came first: the same global batch will be handed out again
    DECIDED = "decided"  # the optimizer step is applied (or skipped by all, as GradScaler does on inf)


class Undoable(Protocol):
    """A copy of what an optimizer can change (undo.py)."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters that it puts back."""
        ...

    def put_back(self) -> None:
        """Return to it."""
        ...


class Participant(Protocol):
    """What an optimizer keeps of the step that is open (optim/loader_path.py)."""

    def begin_padding(self) -> None:
        """Loop bodies follow whose gradients do not count: those reduced so far have to be kept."""
        ...

    def end_overlap(self, reason: str) -> None:
        """The step ends: nothing may be on its way to other ranks any more."""
        ...


class Observer(Protocol):
    """Looks after the tensors that user code may change before a step is decided (state/step_state.py)."""

    def before_applying(self) -> None:
        """The first optimizer of the step is about to apply its gradients, or would if the step was not aborted."""
        ...

    def aborted(self) -> None:
        """The step is aborted; the rest of the loop body runs on."""
        ...

    def trust(self, parameters: Sequence[torch.Tensor]) -> None:
        """The step of an optimizer was taken back: these parameters are as they were before it."""
        ...


@dataclass
class _OpenStep:
    phase: Phase = Phase.NONE
    batch: Batch | None = None
    on_decided: Callable[[Batch | None], None] | None = None
    tracked: frozenset[int] = frozenset()
    stepped: set[int] = field(default_factory=set)
    undo: dict[int, Undoable] = field(default_factory=dict)  # by id of the optimizer
    participants: list[Participant] = field(default_factory=list)
    weight: float | None = None
    is_weighed: bool = False
    is_rehearsal: bool = False


_NOT_UNDONE = (Phase.NONE, Phase.DECIDED)


_step = _OpenStep()
_when_decided: Callable[[], None] | None = None
_observer: Observer | None = None


def open(batch: Batch, is_rehearsal: bool = False) -> None:
    """The loader hands out `batch`; in a rehearsal its step is aborted, whatever the loop body does."""
    if batch.index == 0:
        _forget()
    _step.phase, _step.batch = Phase.ABORTED if is_rehearsal else Phase.OPEN, batch
    _step.weight, _step.is_weighed, _step.is_rehearsal = None, False, is_rehearsal
    if is_rehearsal and _observer is not None:
        _observer.aborted()


def pad(batch: Batch) -> None:
    """The gradients of the global batch are reduced, and the loop body has not called step(): it runs again, with a
    batch that does not count."""
    if _step.batch is not None and not _step.batch.is_padding:
        for participant in _step.participants:
            participant.begin_padding()
    _step.batch, _step.weight, _step.is_weighed = batch, None, False


def close() -> None:
    """No batch is out any more: the loader has ended its epoch, or it was closed. What was applied of a step that
    is not decided is undone."""
    _end_overlaps("its step was abandoned")
    _undo()
    _forget()
    _step.phase, _step.batch, _step.is_rehearsal = Phase.NONE, None, False


def state() -> str:
    """The name of the phase: "none", "open", "reduced", "aborted" or "decided"."""
    return _step.phase.value


def batch() -> Batch | None:
    """The batch that is out; None without a loader of ours."""
    return _step.batch


def is_undecided() -> bool:
    """Whether a batch is out whose step has not been applied."""
    return _step.phase in (Phase.OPEN, Phase.REDUCED, Phase.ABORTED)


def is_rehearsal() -> bool:
    """Whether the batch that is out is a rehearsal's."""
    return _step.is_rehearsal


def expects_micro_batch() -> bool:
    """Whether the batch that is out is a micro-batch that further ones of its global batch follow."""
    if _step.batch is None or _step.batch.is_last:
        return False
    return _step.phase is Phase.OPEN or (_step.phase is Phase.ABORTED and _step.is_rehearsal)


def reduced() -> None:
    """Every gradient of the global batch has arrived on this rank."""
    _step.phase = Phase.REDUCED


def aborted() -> None:
    """The step in flight will not be applied; its gradients are dropped. The loop body goes on to its end: what
    optimizers have changed, and change until then, is taken back by take_back()."""
    _end_overlaps("its step was aborted")
    if _step.phase is not Phase.ABORTED and _observer is not None:
        _observer.aborted()
    _step.phase = Phase.ABORTED


def take_back() -> None:
    """The loop body of an undecided step is over, or left: optimizers go back to where they were before it."""
    aborted()
    _undo()


# Several optimizers ------------------------------------------------------------------------------------------


def track(optimizers: Iterable[object]) -> None:
    """These decide a step together; without any, each step of an optimizer is one."""
    _step.tracked = frozenset(map(id, optimizers))
    _forget()


def take_part(participant: Participant) -> None:
    """An optimizer has something of the batch that is out; once for each global batch."""
    _step.participants.append(participant)


def is_noticed() -> bool:
    """Whether any optimizer of ours has done something for the batch that is out."""
    return bool(_step.participants)


def is_shared() -> bool:
    """Whether several optimizers decide a step together."""
    return len(_step.tracked) > 1


def is_tracked(optimizer: object) -> bool:
    """Whether this optimizer decides steps, as each of them does where none is tracked."""
    return not _step.tracked or id(optimizer) in _step.tracked


def awaits_others(optimizer: object) -> bool:
    """Whether the step is still undecided once this optimizer has stepped."""
    return bool(_step.tracked - _step.stepped - {id(optimizer)}) and id(optimizer) in _step.tracked


def applying(optimizer: object) -> None:
    """Called before an optimizer changes anything, or would if the step was not aborted."""
    if _observer is not None and not _step.stepped and id(optimizer) not in _step.undo:
        _observer.before_applying()


def undo_by(optimizer: object, undo: Undoable) -> None:
    """Called before an optimizer changes anything: how to take that back, should the step not be decided."""
    _step.undo[id(optimizer)] = undo


def undo_of(optimizer: object) -> Undoable | None:
    """What undo_by() was told for it in the step that is open."""
    return _step.undo.get(id(optimizer))


def stepped(optimizer: object) -> None:
    """The optimizer has applied its gradients. Decides the step when it is the last one, or not tracked."""
    recording.updated(optimizer)
    _step.stepped.add(id(optimizer))
    if id(optimizer) not in _step.tracked or _step.tracked <= _step.stepped:
        decided()


def end_body() -> None:
    """The loop body is over: what has stepped in it decides the step, if some of several optimizers have. Which ones
    did is the same on all ranks, or the header of the next reduction differs. Nothing otherwise."""
    if _step.phase is Phase.REDUCED and _step.stepped:
        decided()


def decided() -> None:
    """The optimizers have stepped: everything else that belongs to the step happens now, or not at all."""
    _forget()
    try:
        if _step.on_decided is not None:
            _step.on_decided(_step.batch)
    finally:  # also where a callback has raised: the gradients are applied
        if _step.phase is not Phase.NONE:
            _step.phase = Phase.DECIDED
    status_reporting.report_progress()
    tell_decided()


def when_next_decided(callback: Callable[[], None]) -> None:
    """Call this once, as soon as a step is decided; in the place of what was to be called before."""
    global _when_decided
    _when_decided = callback


def tell_decided() -> None:
    """A step is decided, or, where none are counted, a commit was made."""
    global _when_decided
    if _when_decided is not None:
        callback, _when_decided = _when_decided, None
        callback()


def on_decided(callback: Callable[[Batch | None], None] | None, observer: Observer | None = None) -> None:
    """Who moves counter, cursor and schedulers with the step (a TorchState); None takes it away. The step counts,
    whatever the callback raises."""
    global _observer
    _step.on_decided, _observer = callback, observer
    if callback is None:
        track(())


def _end_overlaps(reason: str) -> None:
    for participant in _step.participants:
        participant.end_overlap(reason)


def _undo() -> None:
    if _step.phase not in _NOT_UNDONE:
        while _step.undo:
            undo = _step.undo.popitem()[1]
            undo.put_back()
            recording.undone()
            if _observer is not None:
                _observer.trust(undo.parameters)
    _step.stepped.clear()


def _forget() -> None:
    _step.stepped.clear()
    _step.undo.clear()
    _step.participants.clear()


# What a micro-batch weighs -----------------------------------------------------------------------------------


def set_weight(weight: float) -> None:
    """What the mean loss of the batch that is out weighs, in units of the user's. Raises StepError too late."""
    if _step.is_weighed and _step.weight != weight:
        raise StepError(
            f"weight({weight:g}) after backward(): its gradients count already, with weight {_step.weight}; call it "
            f"before the backward() of the same loop body"
        )
    _step.weight = weight


def weight() -> float | None:
    """What set_weight() said for the batch that is out; None: the number of its samples counts."""
    _step.is_weighed = True
    return _step.weight
