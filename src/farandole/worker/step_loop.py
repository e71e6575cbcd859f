"""The run loop of the step rule: faults and planned changes are absorbed in place, at the step they came in."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import TypeVar

from farandole import whereabouts
from farandole.collectives import world
from farandole.collectives.transport import Transport
from farandole.errors import CollectiveMismatch, JobEnded, RecoverableError
from farandole.messages import Elastic, Synced
from farandole.optim.buckets import reserve
from farandole.optim.ddp.adoption import adopt
from farandole.optim.distributed_optimizer import ReducingOptimizer
from farandole.sighting import Phase
from farandole.state import boundary, recording, step
from farandole.state.host_updates import HostUpdateResult
from farandole.state.step_state import StepState
from farandole.state.sync import SyncReport, synchronize
from farandole.whereabouts import In
from farandole.worker.checkpoints import checkpoints
from farandole.worker.finish import all_have_finished
from farandole.worker.heap import map_ahead
from farandole.worker.job import Job
from farandole.worker.leaving import leaving_on_sigterm
from farandole.worker.randomness import reseed
from farandole.worker.recovery import regroup, report_first_step
from farandole.worker.sample_records import sample_records
from farandole.worker.state_watch import StateWatch

ResultT = TypeVar("ResultT")

logger = logging.getLogger("farandole")

_ONCE = struct.Struct("<3q")  # epoch, decided steps, number of the call
_EPOCH_END = struct.Struct("<3qQ")  # epoch, decided steps, prepared, digest


class StepLoop:
    """One call of an elastic function. What loader and optimizer ask at each boundary is answered here."""

    def __init__(self, job: Job | None, state: StepState) -> None:
        self._job = job
        self._state = state
        self._records = sample_records(state)
        self._checkpoints = checkpoints(job, state, "step")
        self._watch = StateWatch(job, state, self._records, self._checkpoints)
        self._is_busy = False  # the state is being changed by us, not by user code

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        state = self._state
        if adopt(state.modules(), state.optimizers(), self._accumulates):
            state.track_optimizers()
        boundary.install(self)
        recording.install(self._records)
        if state.loader is not None:
            state.loader.boundary = self
        try:
            with leaving_on_sigterm(self._job, self._may_end_here):
                try:
                    with In(Phase.USER):
                        return self._run(call)
                except (JobEnded, SystemExit):
                    self._save_in_emergency()
                    raise
                finally:
                    if self._checkpoints is not None:
                        self._checkpoints.close()
        finally:
            boundary.install(None)
            recording.install(None)
            if self._records is not None:
                self._records.close()
            step.close()

    def _accumulates(self) -> bool:
        return bool(getattr(self._state.loader, "accumulates", False))

    def _run(self, call: Callable[[], ResultT]) -> ResultT:
        self._enter()
        while True:
            try:
                result = call()
                step.end_body()  # of a loop that was left by `break`
            except RecoverableError as error:
                if self._job is None:
                    raise
                logger.info("leaving the elastic function to regroup: %s", error)
            else:
                if all_have_finished(self._job):
                    if self._checkpoints is not None:
                        self._checkpoints.at_end()
                    return result
            self._regroup()

    # Entering and returning ------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._is_busy = True
        self._begin()
        if self._checkpoints is not None:
            self._checkpoints.entered()
        self._is_busy = False

    def _begin(self) -> None:
        """Everybody starts from the same state: the source's; at the start of the job, rank 0's."""
        job = self._job
        step.close()
        if job is not None and job.is_newcomer():
            self._get_ready()
        elif self._state.loader is not None:
            self._state.loader.limit_local_batch(world.current().placement.size)
        self._state.capture()
        if job is not None:
            job.link.send(Elastic())
        if job is not None and (job.is_newcomer() or job.has_to_regroup()):
            self._regroup()
            return
        here = world.current()
        try:
            report = self._agree(here.transport, founding=not self._state.is_holder)
        except RecoverableError:
            if job is None:
                raise
            self._regroup()
            return
        if job is not None:
            job.link.send(Synced(here.id.number))
        if self._state.loader is not None:
            self._state.loader.set_world(here.placement.rank, here.placement.size)
        if self._records is not None:
            self._records.started(here.placement.rank in report.behind)

    def _get_ready(self) -> None:
        """What a newcomer can do before the others wait for it."""
        map_ahead(self._state.modules())
        for optimizer in self._state.optimizers():
            if isinstance(optimizer, ReducingOptimizer):
                reserve(parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._state.loader is not None:
            self._state.loader.warm_up()

    # The loader asks (data/boundary.py) ------------------------------------------------------------------

    def reach(self) -> None:
        """A boundary: each next(loader). The only place in the middle of an epoch where workers regroup."""
        if self._job is not None and self._job.link.is_over():
            self._job.link.raise_if_over()
        state, self._is_busy = self._state, True
        is_inside_ticket = step.state() == "open"
        if self._job is not None and (step.state() == "aborted" or self._job.has_to_regroup()):
            if step.is_undecided():
                step.aborted()
            self._regroup()
        elif is_inside_ticket or step.state() in ("reduced", "aborted"):
            self._is_busy = False
            return  # the next micro-batch, or a loop body that the loader is about to refuse
        elif state.digests.is_suspicious:
            self._mend()
        self._pass_boundary()
        self._is_busy = False

    def reach_epoch_end(self) -> bool:
        """Every rank has resumed epochs(). False: there was a regroup instead, and the epoch is as it was, or
        as it is on the ranks that had passed already."""
        state = self._state
        state.boundary += 1  # ahead of those that are in the tail: should it come again, the epoch is through for all
        epoch = state.progress.epoch
        try:
            note = _EPOCH_END.pack(epoch, state.step, self.prepared(), self._watch.sample())
            notes = world.current().transport.all_gather(note)
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            return False
        said = [_EPOCH_END.unpack(note) for note in notes]
        if any(each[:2] != said[0][:2] for each in said):
            raise CollectiveMismatch(
                f"workers ended different epochs; (epoch, step) by rank: {[each[:2] for each in said]}"
            )
        self.agree([each[2] for each in said])
        self._watch.compare([each[3] for each in said], is_sample=True)
        if state.digests.is_suspicious and not self._mend():
            return False
        if self._records is not None:
            self._records.epoch_ended()
        state.boundary += 1
        return True

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> bool:
        """See data/epoch.py. Whoever is through with it is ahead of those that are not."""
        state = self._state
        if state.once[0] == epoch and call < state.once[1]:
            return False
        here = (epoch, state.step, call)
        said = [_ONCE.unpack(note) for note in world.current().transport.all_gather(_ONCE.pack(*here))]
        if any(each != here for each in said):
            raise CollectiveMismatch(
                f"epoch.once() was called at different places; (epoch, step, number of the call) by rank: {said}"
            )
        function()
        state.once = (epoch, call + 1)
        state.boundary += 1
        return True

    def _pass_boundary(self) -> None:
        """Remember the small state, and start the step's random numbers from (seed, step, rank): a step that
        is done again sees the same ones."""
        state = self._state
        state.boundary += 1
        state.capture()
        self._watch.at_boundary(self._checkpoints is not None and self._checkpoints.at_boundary())
        whereabouts.say_place(world.current().id.number, state.step)
        seed = state.loader.seed if state.loader is not None else 0
        reseed(seed, state.step, world.current().placement.rank)

    def _mend(self) -> bool:
        """The states of the workers are not the same, as all of them know: compare everything, and make them so. False:
        there was a regroup instead."""
        self._is_busy = True
        self._state.capture()
        here = world.current()
        try:
            self._agree(here.transport, founding=False, compares_all=True)
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            return False
        if self._state.loader is not None:
            self._state.loader.set_world(here.placement.rank, here.placement.size)
        self._is_busy = False
        return True

    def _regroup(self) -> None:
        """From a fault or an agreed change to the same state on all members of the next generation."""
        assert self._job is not None
        state, self._is_busy = self._state, True
        begun, in_flight = state.step, step.batch() if step.is_undecided() else None
        if step.is_undecided():
            state.put_back()  # the aborted pass has moved BatchNorm's statistics, and perhaps more
        else:
            state.capture()
        step.close()
        done = regroup(self._job, self._agree)
        if state.loader is not None:
            state.loader.set_world(done.rank, done.size)
        if self._records is not None:
            self._records.started(done.report is not None and done.rank in done.report.behind)
        state.on_reset()  # on every member, so that what callbacks change is the same everywhere
        if in_flight is not None and state.step == begun:
            report_first_step(self._job, done, 1, in_flight.ticket.global_samples)
        else:  # nothing was in flight, or somebody had applied it
            report_first_step(self._job, done)
        done.log(f"step {state.step}")
        self._is_busy = False

    def _agree(self, transport: Transport, founding: bool, compares_all: bool = False) -> SyncReport:
        if self._checkpoints is not None:
            self._checkpoints.before_sync(transport.rank, founding)
        report = synchronize(self._state, transport, founding, compares_all)
        self._watch.synchronized(report)
        return report

    # The job ends before it is finished ------------------------------------------------------------------

    def _may_end_here(self) -> bool:
        """Whether the state is whole where the main thread is: it is not while a step is being applied."""
        return not self._is_busy and step.state() != "reduced"

    def _save_in_emergency(self) -> None:
        self._is_busy = True
        is_undecided = step.is_undecided()
        if is_undecided:
            step.aborted()
        if self._checkpoints is not None:
            self._checkpoints.in_emergency(is_captured=is_undecided)

    # The optimizer asks (state/boundary.py) --------------------------------------------------------------

    def can_repeat(self) -> bool:
        return self._job is not None and step.batch() is not None

    def steps_decided(self) -> int:
        return self._state.step

    def prepared(self) -> int:
        return self._job.link.prepared if self._job is not None else 0

    def agree(self, prepared_by_rank: list[int]) -> None:
        if self._job is not None:
            self._job.agree(prepared_by_rank)

    def digest(self) -> int:
        return self._watch.digest

    def has_saved(self) -> bool:
        return self._watch.has_saved

    def compare(self, digests_by_rank: list[int], has_any_saved: bool) -> None:
        self._watch.heard(digests_by_rank, has_any_saved)

    def hears_of_updates(self) -> bool:
        return True

    def agreed_update(self) -> HostUpdateResult | None:
        return None  # The loader notices planned changes, and nobody has to leave the function for one.

    def committing(self) -> None:
        """Every step is a commit here."""

    def committed(self) -> None:
        """As above."""
