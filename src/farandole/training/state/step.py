"""The current step, and its status; loader, optimizers and run loop share it. Main thread only.

              next micro-batch        another pass or optimizer, padding
                    ┌─┐                        ┌─┐
                    │ ▼                        │ ▼
    NONE ─ open ─► OPEN ── mark_reduced ──► REDUCED ── decide ──► DECIDED
                    │                          │
                    └───────── abort ──────────┴─────► ABORTED ◄─ open, of a rehearsal
                                                         │ ▲
                                                         └─┘ next micro-batch of the rehearsal

    any status ─ open ─► OPEN        the next global batch, or the same one again after ABORTED
    any status ─ close ─► NONE       the batches of an epoch are through, or workers have regrouped
    NONE ─ decide ─► NONE            a step without a loader of Farandole: there is no batch
    OPEN, REDUCED ─ leave_out ─► DECIDED     all workers leave the batch out: the step is decided, and nothing applied
    DECIDED ─ mark_reduced, abort or decide ─► REDUCED, ABORTED or DECIDED
                                     another optimizer, for the same batch: where no state has the optimizers, each of
                                     them makes a step by itself

Who makes which transition:

    open, pad       the loader, with each micro-batch (data/elastic_loader.py), and with padding
    mark_reduced    an optimizer whose gradients are those of the global batch (optim/loader_path.py)
    abort           an optimizer whose collective failed, or the run loop (worker/step_loop.py)
    mark_stepped    an optimizer that has applied its gradients. It decides the step when it is the last of several
                    optimizers (a GAN)
    end_body        the loader, when the loop body asks for the next batch or has left the loop. It decides a step that
                    only some of several optimizers have made (a generator that steps for every fifth batch)
    leave_out       the run loop, where the loop body has made no step on any worker
    take_back       the run loop, before the same batch comes again: it aborts, and undoes the optimizers' changes
    close           the loader and the run loop

A step is *undecided* while it is OPEN, REDUCED or ABORTED: the changes of its optimizers can be undone. A transition
that is not in the diagram raises StepError. Each optimizer has a status of its own within the step (`GradientStatus` in
optim/loader_path.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from farandole.base.liveness import status_reporting
from farandole.errors import StepError
from farandole.training.state.batch import Batch
from farandole.training.state.session import SESSION
from farandole.training.state.step_participants import NO_OBSERVER, Observer, Participant, Undoable


class StepStatus(enum.StrEnum):
    """The status of the current step. The values stand in error messages."""

    NONE = "none"  # no batch was handed out
    OPEN = "open"  # a batch was handed out; its gradients are not reduced yet
    REDUCED = "reduced"  # every gradient of the global batch has arrived
    ABORTED = "aborted"  # a fault came first: the same global batch will be handed out again
    DECIDED = "decided"  # the optimizer step is applied (or skipped by all, as GradScaler does on inf)


# The names of the diagram. A look-up in an Enum takes 0.3 us in Python 3.11, and a step makes many.
NONE, OPEN, REDUCED, ABORTED, DECIDED = StepStatus

_UNDECIDED = frozenset({OPEN, REDUCED, ABORTED})

# The statuses in which a transition may be made. open() and close() may follow any status.
_PADS_AFTER = frozenset({REDUCED})
_REDUCED_AFTER = frozenset({OPEN, REDUCED, DECIDED})
_ABORTS_AFTER = frozenset({OPEN, REDUCED, ABORTED, DECIDED})
_LEFT_OUT_AFTER = frozenset({OPEN, REDUCED})
_DECIDES_AFTER = frozenset({NONE, REDUCED, DECIDED})


@dataclass
class Facts:
    """What is known of the training of the current global batch. Where nothing else is said, of this worker's part.

    passed           samples for which a backward pass has run
    is_left_out      all workers leave the batch out
    has_early_step   step() was called before the last micro-batch, without effect
    is_dropped       the script has dropped the reduced gradients: zero_grad() was called, and no step() before. All
                     workers leave the batch out then
    has_inf, has_updated  an optimizer has skipped its update; another one has not
    has_untrained    no backward pass has run for some of all workers' samples
    is_without_pass  ... for none of them
    """

    passed: int = 0
    is_left_out: bool = False
    has_early_step: bool = False
    is_dropped: bool = False
    has_inf: bool = False
    has_updated: bool = False
    has_untrained: bool = False
    is_without_pass: bool = False

    def note_update(self, is_skipped: bool) -> None:
        """Note that an optimizer has applied its gradients; or has not, since a GradScaler has found inf or NaN."""
        self.has_inf |= is_skipped
        self.has_updated |= not is_skipped

    def agree_on_passes(self, samples: int, passed: int) -> None:
        """Note, from the headers of all ranks, the samples of a global batch, and those that were passed."""
        self.has_untrained, self.is_without_pass = passed < samples, not passed

    @property
    def trains_nothing(self) -> bool:
        """True when the step that is decided has trained none of its samples."""
        return self.is_left_out or self.is_without_pass or (self.has_inf and not self.has_updated)

    @property
    def trains_in_part(self) -> bool:
        """True when the step that is decided has trained only some of its samples."""
        return self.has_untrained and not self.trains_nothing


@dataclass
class _OpenStep:
    status: StepStatus = NONE
    batch: Batch | None = None
    on_decided: Callable[[Batch | None], None] | None = None
    tracked: frozenset[int] = frozenset()
    stepped: set[int] = field(default_factory=set)
    undo: dict[int, Undoable] = field(default_factory=dict)  # by id of the optimizer
    participants: list[Participant] = field(default_factory=list)
    weight: float | None = None
    adds_losses: bool = False
    is_weighed: bool = False
    is_rehearsal: bool = False
    has_passed: bool = False
    was_handed_out: bool = False  # see take_handed_out()
    passed_in: Batch | None = None  # the batch of the last backward pass
    facts: Facts = field(default_factory=Facts)
    observer: Observer = NO_OBSERVER
    when_decided: Callable[[], None] | None = None  # see when_next_decided()


_step = _OpenStep()


def open(batch: Batch, is_rehearsal: bool = False) -> None:
    """Open a step, since the loader hands out `batch`. In a rehearsal the step is aborted in any case."""
    if batch.index == 0:
        _forget()
        _step.facts = Facts()
    else:
        for participant in _step.participants:
            participant.begin_micro_batch()
    _step.status, _step.batch = ABORTED if is_rehearsal else OPEN, batch
    _step.weight, _step.is_weighed, _step.is_rehearsal = None, False, is_rehearsal
    _step.has_passed = False
    _step.was_handed_out |= not is_rehearsal
    if is_rehearsal:
        _step.observer.aborted()


def take_handed_out() -> bool:
    """Return whether a batch, other than a rehearsal's, was handed out since the last call."""
    was, _step.was_handed_out = _step.was_handed_out, False
    return was


def pad(batch: Batch) -> None:
    """Run the loop body again with a batch that does not count: the gradients of the global batch are reduced, and the
    body has not called step()."""
    _refuse_unless(_PADS_AFTER, "padding is handed out")
    if _step.batch is not None and not _step.batch.is_padding:
        for participant in _step.participants:
            participant.begin_padding()
    _step.batch, _step.weight, _step.is_weighed = batch, None, False


def close() -> None:
    """End the open step: the epoch has ended, or the loader was closed. Undoes what was applied of an undecided one."""
    _end_overlaps("its step was abandoned")
    _undo()
    _forget()
    _step.status, _step.batch, _step.is_rehearsal = NONE, None, False


def status() -> StepStatus:
    """Return the status of the current step."""
    return _step.status


def batch() -> Batch | None:
    """Return the current batch; None without a loader of Farandole."""
    return _step.batch


def is_undecided() -> bool:
    """Return whether there is a batch whose step has not been applied."""
    return _step.status in _UNDECIDED


def is_aborted() -> bool:
    """Return whether the current step has no effect: a fault came first, or it is a rehearsal."""
    return _step.status is ABORTED


def is_rehearsal() -> bool:
    """Return whether the current batch belongs to a rehearsal."""
    return _step.is_rehearsal


def expects_micro_batch() -> bool:
    """Return whether the current batch is a micro-batch and further ones of its global batch follow."""
    if _step.batch is None or _step.batch.is_last:
        return False
    return _step.status is OPEN or (_step.status is ABORTED and _step.is_rehearsal)


def facts() -> Facts:
    """Return what is known of the training of the current global batch."""
    return _step.facts


def observer() -> Observer:
    """Return who watches the tensors that user code may change."""
    return _step.observer


def begin_pass(batch: Batch) -> None:
    """Note that a backward pass of a batch has begun, and counts; also repeatedly."""
    if _step.passed_in is not batch:
        _step.passed_in = batch
        _step.facts.passed += 0 if batch.is_dummy else batch.samples


def drops_reduced(batch: Batch) -> bool:
    """Return whether zero_grad(), which is called now, drops the gradients of the global batch: they are reduced, and
    the script has decided against step(), e.g. since their norm is not finite. In a padding it may be about to
    accumulate, unless its bodies are as many for each step as without Farandole."""
    if _step.status is not REDUCED or not batch.is_last or is_shared():
        return False
    if batch.is_padding and not batch.global_batch.added:
        return False
    _step.facts.is_dropped = True
    return True


def refuse_unknown_scaler() -> None:
    """Raise StepError where a GradScaler is used that the state of the current batch does not have."""
    if _step.batch is not None and not _step.observer.keeps_scaler():
        raise StepError(
            "a GradScaler scales the loss, and the state does not have it: its scale would be another one on a worker "
            "that joins. Pass it to the state: TorchState(..., scaler=scaler)"
        )


def end_pass(batch: Batch) -> None:
    """Note that a backward pass of a batch of strict mode has ended, and counts."""
    _step.has_passed = True
    _step.observer.pass_ended(batch)


def has_passed() -> bool:
    """Return whether a backward pass of the current batch of strict mode has ended, and counts: of any optimizer."""
    return _step.has_passed


def mark_reduced() -> None:
    """Note that every gradient of the global batch has arrived on this rank."""
    _refuse_unless(_REDUCED_AFTER, "its gradients are reduced")
    _step.status = REDUCED


def abort() -> None:
    """Abort the current step and drop its gradients. The loop body runs on to its end; take_back() then undoes the
    changes that optimizers have made until then."""
    _refuse_unless(_ABORTS_AFTER, "it is aborted")
    _end_overlaps("its step was aborted")
    if _step.status is not ABORTED:
        _step.observer.aborted()
    _step.status = ABORTED


def leave_out() -> None:
    """Decide the step without applying it: all workers leave its batch out. Undoes what single optimizers have done."""
    _refuse_unless(_LEFT_OUT_AFTER, "its batch is left out")
    _end_overlaps("its batch was left out")
    _undo()
    _step.facts.is_left_out = True
    _conclude()


def take_back() -> None:
    """Undo the optimizers' changes in an undecided step, after the loop body has ended or was left."""
    abort()
    _undo()


def _refuse_unless(allowed: frozenset[StepStatus], what: str) -> None:
    """Raise StepError for a transition that the diagram does not have."""
    if _step.status not in allowed:
        raise StepError(
            f"the status of the step for {_step.batch} is {_step.status.value!r}, and {what}, which is possible only "
            f"while it is {' or '.join(sorted(allowed))}. This is a defect of Farandole, or of code that calls its "
            f"internal functions"
        )


# Several optimizers ---------------------------------------------------------------------------------------------------


def track(optimizers: Iterable[object]) -> None:
    """Set the optimizers that decide a step together. Without any, each step of an optimizer is one."""
    _step.tracked = frozenset(map(id, optimizers))
    _forget()


def take_part(participant: Participant) -> None:
    """Register an optimizer that has gradients of the current batch; once for each global batch."""
    _step.participants.append(participant)


def is_noticed() -> bool:
    """Return whether any optimizer of Farandole has taken part in the current batch."""
    return bool(_step.participants)


def is_shared() -> bool:
    """Return whether several optimizers decide a step together."""
    return len(_step.tracked) > 1


def is_tracked(optimizer: object) -> bool:
    """Return whether this optimizer decides steps, as each optimizer does where there is no state."""
    return id(optimizer) in _step.tracked or (not _step.tracked and _step.observer is NO_OBSERVER)


def awaits_others(optimizer: object) -> bool:
    """Return whether the step is still undecided once this optimizer has stepped."""
    return bool(_step.tracked - _step.stepped - {id(optimizer)}) and id(optimizer) in _step.tracked


def begin_applying(optimizer: object) -> None:
    """Note that an optimizer is about to change values, or would if the step was not aborted."""
    if not _step.stepped and id(optimizer) not in _step.undo:
        _step.observer.before_applying()


def undo_by(optimizer: object, undo: Undoable) -> None:
    """Register the undo of an optimizer before it changes anything, in case the step is not decided."""
    _step.undo[id(optimizer)] = undo


def undo_of(optimizer: object) -> Undoable | None:
    """Return the undo registered for an optimizer in the open step."""
    return _step.undo.get(id(optimizer))


def mark_stepped(optimizer: object) -> None:
    """Note that the optimizer has applied its gradients. Decides the step when it is the last one, or not tracked."""
    SESSION.recorder.updated(optimizer)
    _step.stepped.add(id(optimizer))
    if id(optimizer) not in _step.tracked or _step.tracked <= _step.stepped:
        decide()


def end_body() -> None:
    """End the loop body. If some of several optimizers have stepped in it, the step is decided. The same ones must have
    stepped on all ranks, or the header of the next reduction differs."""
    if _step.status is REDUCED and _step.stepped:
        decide()


def decide() -> None:
    """Decide the step after the optimizers have stepped: the rest of the step happens now, or not at all."""
    _refuse_unless(_DECIDES_AFTER, "it is decided")
    _conclude()


def _conclude() -> None:
    _forget()
    try:
        if _step.on_decided is not None:
            _step.on_decided(_step.batch)
    finally:  # even if a callback has raised: the gradients are applied
        if _step.status is not NONE:
            _step.status = DECIDED
    status_reporting.report_progress()
    notify_decided()


def when_next_decided(callback: Callable[[], None]) -> None:
    """Call `callback` once, as soon as a step is decided. It replaces an earlier one."""
    _step.when_decided = callback


def notify_decided() -> None:
    """Run the callback of when_next_decided(): a step is decided, or, where none are counted, a commit was made."""
    if _step.when_decided is not None:
        callback, _step.when_decided = _step.when_decided, None
        callback()


def on_decided(callback: Callable[[Batch | None], None] | None, observer: Observer = NO_OBSERVER) -> None:
    """Set the callback that advances counter, cursor and schedulers with the step (a TorchState's); None removes it.
    The step counts even when the callback raises."""
    _step.on_decided, _step.observer = callback, observer
    if callback is None:
        track(())


def _end_overlaps(reason: str) -> None:
    for participant in _step.participants:
        participant.end_overlap(reason)


def _undo() -> None:
    if _step.status in _UNDECIDED:
        while _step.undo:
            undo = _step.undo.popitem()[1]
            undo.put_back()
            SESSION.recorder.undone()
            _step.observer.trust(undo.parameters)
    _step.stepped.clear()


def _forget() -> None:
    _step.stepped.clear()
    _step.undo.clear()
    _step.participants.clear()


# The weight of a micro-batch ------------------------------------------------------------------------------------------


def set_weight(weight: float) -> None:
    """Set the weight of the current batch's mean loss, in the user's units. Raises StepError when it is too late."""
    if _step.is_weighed and _step.weight != weight:
        raise StepError(
            f"weight({weight:g}) after backward(): its gradients already have weight {_step.weight}; call it "
            f"before the backward() of the same loop body"
        )
    _step.weight = weight


def weight() -> float | None:
    """Return the argument of set_weight() for the current batch; None: the weight is the number of its samples."""
    _step.is_weighed = True
    return _step.weight


def add_losses(are_sums: bool) -> None:
    """Note whether losses are sums over samples instead of means, from now on."""
    _step.adds_losses = are_sums


def share() -> float:
    """Return the factor with which the gradient of the current loop body counts in that of the step; 1 without a batch
    of a loader. Only the ratios between ranks matter."""
    batch = _step.batch
    if batch is None:
        return 1.0
    if batch.is_dummy:
        return 0.0
    if _step.adds_losses:
        return 1.0
    return batch.weight if _step.weight is None else _step.weight / batch.global_batch.global_samples
