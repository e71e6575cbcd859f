"""The runs of a loop body without effect: when one is due, and what follows from it.

    rehearsal            the second batch of a job: which values the loop body changes before its step, and whether they
                         can be put back
    trial of the loss    behind it: whether the gradient of a batch is the mean of those of its samples (loss_trial.py)
    trial of newcomers   behind each of their admissions: whether they train as the others do (workers_trial.py)
    later trials         before some steps, and in some epochs: whether the workers have become different, and the loss
                         again, with other samples

Each begins with `begin`, when a batch is handed out, and ends with `end`, at the next boundary. A regroup drops it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import torch

from farandole.errors import ConfigError
from farandole.registry import factory
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.data.elastic_loader import has_compiled
from farandole.training.state.packed_metadata import is_same
from farandole.training.state.step_state import StepState
from farandole.training.state.watched_tensors import are_equal
from farandole.training.worker.loss_trial import LossTrial
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.warm_up import is_plain
from farandole.training.worker.workers_trial import Trial, Tried, judge, judge_twice, own_values

logger = logging.getLogger("farandole")

_REHEARSED = (
    "This run of the loop body was a rehearsal, with a part of a batch: the loss of a worker brings batches of other "
    "sizes, too. Give DataLoader(min_local_batch=...) if the body needs so many samples; TorchState(rehearse=False) "
    "leaves rehearsals out"
)
_NO_MEAN = (
    "the gradient of a batch is not the mean of those of its samples, so that each number of workers trains something "
    "else"
)
_OWN_VALUES = (
    "workers do not train alike with equal samples ({}): the loop has values outside its TorchState{}, which each "
    "worker has of its own samples, so that each number of workers trains something else"
)
LATER_STEPS = frozenset({13, *(10**exponent + 13 for exponent in range(2, 10))})
"""The numbers of decided steps before which trials come again: few, and none at which loops log something. So do they
at the beginning of epochs 1, 2, 4, 8 and so on: what is kept of a sample is another thing when it comes again. In the
middle of a long stream they would cost too much: it is read from its last mark for them, and again behind them."""

_OTHER_DATA = (
    "sample {} of the data set is not the same on all workers, as where random numbers without a seed have made it: "
    "workers train samples of their own"
)


class ValuesOutside:
    """What a loop keeps outside of its state: nothing here. The values that an integration registers, as "values of a
    loop", are brought back."""

    def begin_trial(self) -> None:
        """Remember everything, before a loop body of a rehearsal."""

    def take(self) -> None:
        """Remember, at a boundary, what changes."""

    def roll_back(self) -> None:
        """Return to begin_trial(), or take(): the loop body comes again."""

    def note_newcomer(self) -> None:
        """Say in the last line of the job what a newcomer has not."""

    def changing(self) -> str:
        """Return the names of the tensors that a loop body changes; empty: none is known."""
        return ""

    def draws(self) -> bool:
        """Return whether generators of the loop have gone on since begin_trial()."""
        return False

    def forget(self) -> None:
        """Keep nothing of the loop alive: it has ended."""


class BodiesWithoutEffect:
    """Those of one worker. `is_in_job`: workers may be lost, and join.

    is_untried  this worker is a newcomer that has not run a loop body with the others yet
    outside     what the loop keeps outside of the state
    """

    def __init__(self, state: StepState, is_in_job: bool) -> None:
        self._state, self._is_in_job = state, is_in_job
        self.is_untried = False
        # Strict mode runs a shard twice to find what is not repeated: nothing is brought back in between.
        is_brought_back = is_in_job and state.rehearse and not state.is_strict
        self.outside = factory("values of a loop")(state) if is_brought_back else ValuesOutside()
        self._newcomers: tuple[int, ...] = ()  # ranks of those
        self._rehearsal: Rehearsal | None = None  # it is under way
        self._is_rehearsed = False  # it is over
        self._loss_trial: LossTrial | None = None
        self._trial: Trial | None = None  # of the workers
        self._first_tried = list[Tried]()  # the results of the first of two trials
        self._boundary = (0, 0, 0)  # generation, step and epoch of the last one
        self._agreed_at = (0, 0, 0)  # the one at which all workers have said whether they may try
        self._due = list[str]()  # the later trials that are due at this boundary
        self._found = dict[str, tuple[int, str]]()  # why another number of workers than this trains something else

    def begin(self) -> bool:
        """Begin a run that is due. Returns whether the batch that is handed out now is one without effect: on all
        workers, the second one of the job. In the first one an average of weights is equal to them, and a change of it
        would not be seen. A worker alone needs it in strict mode, in which it may run the loop body several times for a
        step."""
        state, here = self._state, world.current()
        self._note_boundary(here.id.number, here.transport.size)
        if state.has_rehearsed and (self._newcomers or self._due):
            self._agree_to_try(here.transport)
        if state.has_rehearsed and (self._newcomers or self._due[:1] == ["workers"]):
            self.outside.begin_trial()
            self._trial = Trial(state)
            state.on_step = self._trial.look
            reseed(state.loader.seed, state.step, 0)
            return True
        is_rehearsed = state.has_rehearsed and not self._due
        if is_rehearsed or state.step == 0 or not (self._is_in_job or state.is_strict):
            return False
        self.outside.begin_trial()
        if self._loss_trial is None and not (self._is_rehearsed or state.has_rehearsed):
            self._rehearsal = Rehearsal(state)
            state.on_step = self._rehearsal.look
            if getattr(state.loader, "divides_local_batches", False):
                return True  # the trial follows: its batch is not divided
        if self._loss_trial is None and not state.is_strict:
            self._loss_trial = LossTrial(state, here.transport.rank, here.transport.size)
        if self._loss_trial is not None:
            self._loss_trial.begin()
            world.enter(replace(here, told_size=self._loss_trial.told_size))
            reseed(state.loader.seed, state.step, self._loss_trial.seed)
        return True

    def _note_boundary(self, generation: int, size: int) -> None:
        """Find out whether later trials are due. Not in a step before which the workers have regrouped: all have to
        know what is due, also newcomers, and those that have lost a worker in a trial."""
        state, epoch = self._state, self._state.loader.epoch
        before, self._boundary = self._boundary, (generation, state.step, epoch)
        if before[:2] == (generation, state.step - 1):
            is_new_epoch = epoch != before[2] and epoch & (epoch - 1) == 0
            is_possible = self._is_in_job and state.has_rehearsed and size > 1
            is_later = state.step in LATER_STEPS and not (state.step > 100 and state.loader.is_stream)
            self._due = ["workers", "loss"] if is_possible and (is_new_epoch or is_later) else []

    def _agree_to_try(self, transport: Transport) -> None:
        """Drop what is due unless all workers may try it: only some of them may have compiled something."""
        before, self._agreed_at = self._agreed_at, self._boundary
        if before != self._boundary and b"" in transport.all_gather(b"1" if _may_try(self._state) else b""):
            self._newcomers, self._due = (), []

    def part(self) -> tuple[int, int] | None:
        """Return the part of a batch that the run has; None: the worker's own local batch."""
        if self._trial is not None:
            return 0, 1
        return self._loss_trial.part if self._loss_trial is not None else None

    def begin_micro_batch(self) -> None:
        """Begin another micro-batch of the same step, whatever it is."""
        rehearsal = self._rehearsal if self._state.is_strict else None
        if rehearsal is not None:
            rehearsal.end_run()
        self._state.begin_micro_batch()
        if rehearsal is not None:
            rehearsal.begin_run()

    def end(self) -> bool:
        """Return whether no further run follows, after agreement with the other workers. Raises RecoverableError."""
        if self._trial is not None:
            return self._compare_workers(self._trial)
        if self._loss_trial is None:
            self._is_rehearsed = self._rehearsal is not None
            return self._is_rehearsed and self._state.is_strict
        return self._compare_losses(self._loss_trial)

    def _compare_losses(self, trial: LossTrial) -> bool:
        here = replace(world.current(), told_size=None)
        world.enter(here)
        trial.take(here.transport, getattr(self._state.loader, "rows_on_trial", {}))
        if not trial.is_over():
            return False
        self._loss_trial, self._due = None, []
        if sample := trial.differing_sample():
            world.remark("data", _OTHER_DATA.format(sample))
        if found := trial.judge():
            self._find("loss", _NO_MEAN, f"{found}. See docs/your-loop.md")
        return True

    def _find(self, topic: str, text: str, advice: str) -> None:
        """Say why another number of workers trains something else: where it is another one already, or will be, in the
        last line of the job."""
        here = world.current()
        is_known, self._found[topic] = topic in self._found, (here.placement.size, text)
        if here.placement.rank == 0 and not is_known:
            logger.warning("%s; %s", text, advice)
        is_divided_anew = getattr(self._state.loader, "balance", None) is not None or here.id.number > 1
        if is_divided_anew:  # in an earlier generation, other workers may have trained
            world.remark(topic, text)

    def _compare_workers(self, trial: Trial) -> bool:
        """Say in the last line of the job if newcomers do not train as the others do, or these have become different.
        What differs is tried twice, since the loop body may have random numbers of its own."""
        here = world.current()
        tried = trial.end(here.placement.rank in self._newcomers)
        samples = sum(getattr(self._state.loader, "rows_on_trial", {}).values()) % 2**64
        tried = msgspec.structs.replace(tried, samples=samples, draws=self.outside.draws())
        self._trial, self._state.on_step = None, None
        by_rank = here.transport.all_gather(msgspec.msgpack.encode(tried))
        results = [msgspec.msgpack.decode(each, type=Tried) for each in by_rank]
        first, self._first_tried = self._first_tried or results, []
        if not self._newcomers:
            found = own_values(first, results)
            if found and first is results:
                self._first_tried = results
                return False
            self._due = self._due[1:]
            if found:
                changing = self.outside.changing()
                text = _OWN_VALUES.format(found, f", as {changing}" if changing else "")
                self._find("own values", text, "put them there, or compute them from the samples of all workers")
            return True
        verdict = judge(first) if first is results else judge_twice(first, results)
        if verdict.refused and first is results:
            self._first_tried = results
            return False
        self._newcomers, self.is_untried = (), False
        if verdict.refused:
            text = (
                f"a newcomer does not train as the other workers do: {verdict.difference}. What the loop has outside "
                f"its TorchState, a newcomer has not: put it there, or compute it from what is there"
            )
            world.remark("newcomer", text)
        return True

    def put_back(self, is_repeated: bool) -> None:
        """Restore what the loop body has changed, in the state, and where it comes again also outside of it. Raises
        ConfigError if a rehearsal finds that this is not possible."""
        if is_repeated:
            self.outside.roll_back()
        if self._rehearsal is None:
            self._state.put_back()
        else:
            rehearsal, self._rehearsal, self._state.on_step = self._rehearsal, None, None
            rehearsal.end()

    def drop(self) -> None:
        """Drop a trial that is under way, since the workers regroup or the function is left."""
        self._first_tried, self._due = [], []
        if self._trial is not None:
            self._trial.end(False)
            self._trial, self._state.on_step = None, None
        self._is_rehearsed = False
        if self._loss_trial is not None:
            self._loss_trial.drop()
            self._loss_trial = None
            world.enter(replace(world.current(), told_size=None))

    def close(self) -> None:
        """Drop a trial, since the function is left, and keep nothing of its loop."""
        self.drop()
        self.outside.forget()

    def note_newcomers(self, ranks: tuple[int, ...]) -> None:
        """Note the ranks of newcomers that have not run a loop body with the others yet."""
        self._newcomers = ranks
        if ranks:
            self.outside.note_newcomer()

    def regrouped(self, size: int) -> None:
        """Say in the last line of the job what the trials have found, where the number of workers is another one
        now."""
        for topic, (size_of_trial, text) in self._found.items():
            if size_of_trial != size:
                world.remark(topic, text)

    def annotate(self, error: Exception) -> None:
        """Say of an error of the loop body that it came in a trial of the loss, if it did."""
        if self._loss_trial is not None:
            error.add_note(_REHEARSED)


def _may_try(state: StepState) -> bool:
    """Return whether all workers may run a loop body with the same batch, which has another size than their own: not
    where it would be compiled for that."""
    return state.rehearse and not state.is_strict and is_plain(state) and not has_compiled()


# A rehearsal of the effect of a fault: a run of the loop body whose step is aborted -----------------------------------
#
# All values that the body has changed before optimizer.step(), or because step() returned False, have to be restored
# before the batch is repeated. The rehearsal checks whether they are.

_PARTS = {
    "buffers": "the buffers of state.{}",
    "extra": "the extra state of state.{}",
    "groups": "the options of the parameter groups of state.{}",
    "stateful": "state.{}",
    "values": "state.{}",
}


class Rehearsal:
    """The state at the beginning of the rehearsal, right after capture(). Needs as much memory as the parameters, for
    one run of the loop body."""

    def __init__(self, state: StepState) -> None:
        self._state, self._watched = state, state.watched
        self._mark = self._watched.mark()
        self._copies = {name: each.detach().clone() for name, each in self._watched.items()}
        self._metadata = state.copy_of_metadata()
        self._before_step: set[str] | None = None
        self._in_runs: set[str] = set()  # in strict mode, changed in runs of the loop body without a step

    def look(self) -> None:
        """Record the names changed so far as changing before a step. The loop body has called optimizer.step()."""
        if self._before_step is None:
            self._before_step = self._changed()

    def end_run(self) -> None:
        """Record the names changed so far, in strict mode, after a run of the loop body that another one follows: the
        state is about to put them back."""
        self._in_runs |= self._changed()

    def begin_run(self) -> None:
        """Note that the state has put them back, and another run of the loop body begins."""
        self._mark = self._watched.mark()

    def end(self) -> None:
        """Restore everything after the loop body. Raises ConfigError, with its name, for a value that differs."""
        changed, watched = self._changed() | self._in_runs, self._watched
        with torch.no_grad():
            for name, live in watched.items():
                if name in changed:
                    live.detach().copy_(self._copies[name])
        watched.trust([live for _, live in watched.items()])
        # In strict mode any change may come in a run of the loop body that makes no step, and has to be put back then.
        before_step = changed if self._state.is_strict else self._before_step or set()
        watched.add_changing(before_step)
        watched.add_changing_late(changed - before_step)
        self._state.put_back()
        metadata = self._state.copy_of_metadata()
        for part, what in _PARTS.items():
            for name, value in self._metadata[part].items():
                if not is_same(value, metadata[part][name]):
                    raise ConfigError(_message(what.format(name), value, metadata[part][name]))

    def _changed(self) -> set[str]:
        """Return the names of the changed tensors. Tensors written with the bytes that they had are included: the next
        loop body may write others."""
        others = {name for name, live in self._watched.items() if not are_equal(live, self._copies[name])}
        return others | (set(self._watched.changed(self._mark)) - self._watched.trusted)


def _message(what: str, before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in before if key not in after or not is_same(before[key], after[key])]
        if keys:
            what = f"{what} ({', '.join(map(str, keys[:3]))})"
    return (
        f"{what} changed in the loop body before optimizer.step() and is not restored: it differs after "
        f"load_state_dict() of the value that was saved before the loop body. When a worker is lost, the step would be "
        f"repeated with the changed value. Make its state_dict() and load_state_dict() save and load everything that "
        f"the loop body changes, change it in TorchState(after_step=[...]), or leave it out of the state"
    )
