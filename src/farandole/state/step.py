"""The step that is open right now: loader, optimizer and run loop meet here. Main thread only.

    none ── open() ──► open ── reduced() ──► reduced ── decided() ──► decided
                         └───── aborted() ─────┴──────► aborted

The loader opens it with a batch, the optimizer reduces and applies, and whoever sees a fault aborts it. With several
optimizers (a GAN) they reduce and apply one after the other; the step is decided when the last of them has stepped, or
when the loop body ends without the others (a generator that steps for every fifth batch); until then it can be undone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from farandole import whereabouts
from farandole.errors import StepError
from farandole.state import recording
from farandole.state.ticket import Batch


class Phase(str, enum.Enum):
    NONE = "none"  # no batch was handed out
    OPEN = "open"  # a batch was handed out; its gradients are not reduced yet
    REDUCED = "reduced"  # every gradient of the global batch is here
    ABORTED = "aborted"  # a fault came first: the same global batch will be handed out again
    DECIDED = "decided"  # the optimizer step is applied (or skipped by all, as GradScaler does on inf)


class Participant(Protocol):
    """What an optimizer keeps of the step that is open (optim/native_path.py)."""

    def begin_padding(self) -> None:
        """Loop bodies follow whose gradients do not count: those reduced so far have to be kept."""
        ...

    def end_flight(self, reason: str) -> None:
        """The step ends: nothing may be on its way to other ranks any more."""
        ...


@dataclass
class _OpenStep:
    phase: Phase = Phase.NONE
    batch: Batch | None = None
    on_decided: Callable[[Batch | None], None] | None = None
    tracked: frozenset[int] = frozenset()
    stepped: set[int] = field(default_factory=set)
    undo: list[Callable[[], None]] = field(default_factory=list)
    participants: list[Participant] = field(default_factory=list)
    weight: float | None = None
    is_weighed: bool = False


_NOT_UNDONE = (Phase.NONE, Phase.DECIDED)


_step = _OpenStep()
_when_decided: Callable[[], None] | None = None


def open(batch: Batch) -> None:
    """The loader hands out `batch`."""
    if batch.index == 0:
        _forget()
    _step.phase, _step.batch = Phase.OPEN, batch
    _step.weight, _step.is_weighed = None, False


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
    _end_flights("its step was abandoned")
    _undo()
    _forget()
    _step.phase, _step.batch = Phase.NONE, None


def state() -> str:
    """The name of the phase: "none", "open", "reduced", "aborted" or "decided"."""
    return _step.phase.value


def batch() -> Batch | None:
    """The batch that is out; None without a loader of ours."""
    return _step.batch


def is_undecided() -> bool:
    """Whether a batch is out whose step has not been applied."""
    return _step.phase in (Phase.OPEN, Phase.REDUCED, Phase.ABORTED)


def reduced() -> None:
    """Every gradient of the global batch has arrived on this rank."""
    _step.phase = Phase.REDUCED


def aborted() -> None:
    """The step in flight will not be applied; its gradients are dropped. Optimizers that have stepped already go
    back to where they were."""
    _end_flights("its step was aborted")
    _undo()
    _step.phase = Phase.ABORTED


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


def undo_by(function: Callable[[], None]) -> None:
    """Called before an optimizer steps: how to take that back, should the step not be decided."""
    _step.undo.append(function)


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
    if _step.on_decided is not None:
        _step.on_decided(_step.batch)
    whereabouts.say_that_it_moves()
    tell_decided()
    if _step.phase is not Phase.NONE:
        _step.phase = Phase.DECIDED


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


def on_decided(callback: Callable[[Batch | None], None] | None) -> None:
    """Who moves counter, cursor and schedulers with the step (a TorchState); None takes it away."""
    _step.on_decided = callback
    if callback is None:
        track(())


def _end_flights(reason: str) -> None:
    for participant in _step.participants:
        participant.end_flight(reason)


def _undo() -> None:
    if _step.phase not in _NOT_UNDONE:
        while _step.undo:
            _step.undo.pop()()
            recording.undone()
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
