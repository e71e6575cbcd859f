"""The trials of a script: bodies of its loop without effect, which show whether fewer workers train alike
(division_trial.py), and whether newcomers train as the others do (worker/workers_trial.py).

Those who find something wait until the coordinator has announced the change of workers that follows from it.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from farandole.base.membership import Placement
from farandole.errors import GenerationEnded, StepError
from farandole.integrations.torchrun.in_place.division_trial import DivisionTrial, Sizes
from farandole.integrations.torchrun.in_place.number_of_workers import NumberOfWorkers
from farandole.integrations.torchrun.in_place.script_collectives import echo_world
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.training.collectives import world
from farandole.training.data.listed_batches import ListedBatches
from farandole.training.state.step_state import StepState
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.worker_job import WorkerJob
from farandole.training.worker.workers_trial import Trial, Tried, Verdict, judge

logger = logging.getLogger("farandole")

_MOST_LOOKS = 6000  # for the permission to leave, 10 ms apart


class ScriptTrials:
    """The trials of one worker.

    Attributes:
        is_on_trial: This worker is a newcomer that has not trained yet.
        on_trial: Ranks of those.
        going_on: A generator of the script: a trial would make it go on; empty: there is none.
        other_place: Where a newcomer's script stands that is not where those of the others do.
        apart: The real world, while a body of a trial runs apart from it.
    """

    def __init__(
        self,
        job: WorkerJob | None,
        state: StepState,
        loader: ScriptLoader,
        script: ScriptState,
        number: NumberOfWorkers,
    ) -> None:
        self._job, self._state, self._loader, self._script, self._number = job, state, loader, script, number
        self.is_on_trial = job is not None and job.is_newcomer()
        self.on_trial: list[int] = []
        self.going_on = self.other_place = ""
        self.apart: world.World | None = None
        self._division: DivisionTrial | None = None  # it is under way
        self._newcomers: Trial | None = None  # it is under way

    def begin(self) -> bool:
        """Begin a trial that is due, or its next body. Returns whether the batch that is handed out now belongs to
        it."""
        loader, state = self._loader, self._state
        if self._number.has_to_try(state.step) and not (self.on_trial or self.going_on):
            self._divide_batch()
            return True
        if not (self.on_trial and loader.batches_of_step) or loader.static_because:
            return False
        self._newcomers = Trial(state)
        state.on_step = self._newcomers.look
        loader.is_of_trial = True
        reseed(loader.seed, state.step, 0)  # as on the worker whose samples these are
        return True

    def look(self) -> None:
        """Look at what a body of the trial of a division has changed, before it is put back."""
        if self._division is not None:
            self._division.look()

    def come_back(self) -> None:
        """Return to the real world, at the end of a body that has run apart from it. Idempotent."""
        if self.apart is not None:
            world.enter(self.apart)
            self.apart = None

    # The trial of a division -------------------------------------------------------------------------------

    def _divide_batch(self) -> None:
        """Begin the next body of the trial."""
        loader = self._loader
        if self._division is None:
            seed, number = loader.seed + self._state.step, world.current().id.number
            sizes = _sizes_of(loader.listed, world.current().placement)
            tensors = self._script.digests_of_tensors
            self._division = DivisionTrial(
                self._state, seed, sizes, loader.collated, loader.is_collated_by_script, tensors, number
            )
        if workers := self._division.workers_seen():
            here = self.apart = world.current()
            world.enter(echo_world(here, min(here.placement.rank, workers - 1), workers))
        self._division.begin_body()
        loader.change = self._division.batch

    def end_of_division(self) -> bool:
        """End a body of the trial. Returns whether another one follows.

        Raises:
            RecoverableError: A worker is lost; or more workers are needed, and are about to come.
        """
        trial, self._division, self._loader.change = self._division, None, None
        if trial is None:
            return False
        if trial.generation != world.current().id.number:  # it begins anew, if it is still due
            trial.drop()
            return False
        trial.end_body()
        if not trial.is_over(world.current().transport):
            self._division = trial
            return True
        self._number.note_trial(trial.because, trial.is_open, self._state.step)
        if trial.is_open:
            text = "gradients of equal samples differ, so that it could not be shown whether fewer workers train alike"
            world.remark("trial of a division", text)
        if trial.because:
            self._wait_for_change(gives_up=True)
        return False

    # The trial of a newcomer -------------------------------------------------------------------------------

    def end_of_newcomers(self) -> Tried | None:
        """Return the result of the trial that is under way; None: there is none."""
        trial, self._newcomers = self._newcomers, None
        if trial is None:
            return None
        self._state.on_step, self._loader.is_of_trial = None, False
        return trial.end(self.is_on_trial, self.other_place)

    def judge_newcomers(self) -> None:
        """Let newcomers leave that do not train as the others do, at the end of a trial, or where a generator would
        have gone on in it.

        Raises:
            RecoverableError: A worker is lost; or the newcomers may leave now.
        """
        tried = self.end_of_newcomers()
        if tried is not None:
            by_rank = world.current().transport.all_gather(msgspec.msgpack.encode(tried))
            verdict = judge([msgspec.msgpack.decode(each, type=Tried) for each in by_rank])
        elif self.on_trial and self.going_on:
            reason = f"{self.going_on}, a generator, goes on in the loop body, and cannot be carried over"
            verdict = Verdict(tuple(self.on_trial), reason)
        else:
            return
        if verdict.refused:
            self._let_leave(verdict)
            return
        self.is_on_trial, self.on_trial = False, []
        if verdict.is_open:
            text = (
                f"whether newcomers train as the others do could not be shown: with equal samples and random numbers, "
                f"{verdict.difference} on other workers, too"
            )
            world.remark("trial of newcomers", text)

    def _let_leave(self, verdict: Verdict) -> None:
        """Wait until the refused newcomers may leave, and raise GenerationEnded."""
        job, here = self._job, world.current()
        assert job is not None
        text = f"a newcomer was not admitted, since it would not train as the others do: {verdict.difference}"
        if verdict.difference.startswith("with"):
            text += "; the script has state that cannot be carried over"
        world.remark("refused newcomer", text)
        if here.placement.rank in verdict.refused:
            logger.error("this worker leaves: %s", text)
            job.link.ask_to_leave()
        self._wait_for_change(gives_up=here.placement.rank in verdict.refused)

    def _wait_for_change(self, gives_up: bool) -> None:
        """Wait, in agreement with the others, until the coordinator has announced a change of the workers.

        Args:
            gives_up: Raise StepError after a minute.

        Raises:
            GenerationEnded: It has.
            RecoverableError: A worker is lost, or the generation has ended, instead.
        """
        job, here = self._job, world.current()
        assert job is not None
        looks = 0
        while not job.has_to_regroup():
            if gives_up and looks == _MOST_LOOKS:
                raise StepError("the coordinator has announced no change of the workers within a minute")
            looks += 1
            job.link.catch_up()
            prepared = here.transport.all_gather(job.link.prepared.to_bytes(8, "big"))
            job.agree([int.from_bytes(each, "big") for each in prepared])
            threading.Event().wait(0.01)
        raise GenerationEnded("a trial", here.id.number, "the workers change because of it")


def _sizes_of(listed: ListedBatches, here: Placement) -> Sizes:
    workers, last = (listed.workers, here.size), listed.last_global_batch
    is_smaller = listed.batches_of_step == 1 and here.size <= last < listed.largest_global_batch
    parts = (last // listed.workers, len(range(here.rank, last, here.size)))
    return Sizes(listed.largest, workers, parts if is_smaller else (0, 0))
