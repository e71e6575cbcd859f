"""The run loop of the step rule: faults and planned changes are absorbed in place, at the step in which they occur.

Two diagrams say where the script is: that of its place (place.py), and within a loop body that of the step
(state/step.py). The run loop moves it on, and signals wait meanwhile (signals.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase
from farandole.base.wire.link_messages import Elastic, Synced
from farandole.errors import GenerationEnded, JobEnded, RecoverableError
from farandole.registry import factory
from farandole.training.collectives import agreement, world
from farandole.training.collectives.transport import Transport
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.data.loader_arguments import refuse_sync_batch_norm
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.optimizer_state import is_shard
from farandole.training.state.session import SESSION, RunLoop
from farandole.training.state.step import StepStatus
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import SyncReport, synchronize
from farandole.training.state.watched_tensors import layers_with_statistics, make_statistics_equal
from farandole.training.worker.bodies_without_effect import BodiesWithoutEffect
from farandole.training.worker.checkpoints import checkpoints
from farandole.training.worker.meetings import LeftOutBatches, all_have_finished, meet_at_call, meet_at_epoch_end
from farandole.training.worker.place import BEFORE, BEHIND, BODY, ENTERING, JOINED, moved, without_batch
from farandole.training.worker.sample_records import sample_records
from farandole.training.worker.signals import Signals
from farandole.training.worker.state_watch import StateWatch
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.strict_steps import strict_steps
from farandole.training.worker.training_reports import remark_training, report_boundary
from farandole.training.worker.warm_up import reserve_memory, warm_up
from farandole.training.worker.worker_job import WorkerJob
from farandole.training.worker.worker_recovery import BodyCalls, Connection, connect, regroup, report_first_step

if TYPE_CHECKING:
    from farandole.training.data.balance import Balance

logger = logging.getLogger("farandole")
ResultT = TypeVar("ResultT")

_SECOND_CALL = (
    "Farandole has called this elastic function before, on this worker, to warm up before the worker joined. Code "
    "before its loop must work in a second call, too; TorchState(rehearse=False) skips the warm-up"
)
_INTERRUPTED = "a worker was lost in this run of the loop body; other ranks take part again after it"


class StepLoop(RunLoop, LoaderHooks):
    """A call of an elastic function. It answers the requests of loader and optimizer at each boundary."""

    def __init__(self, job: WorkerJob | None, state: StepState) -> None:
        self._job = job
        self._state = state
        self._place = ENTERING
        self._signals = Signals(job, lambda: step.status() is not StepStatus.REDUCED)
        self._records = sample_records(state)
        self._checkpoints = checkpoints(job, state, "step")
        self._watch = StateWatch(job, state, self._records, self._checkpoints)
        self._strict = strict_steps(job, state, self._records)
        self._left_out = LeftOutBatches(state)
        self._without_effect = BodiesWithoutEffect(state, job is not None)
        self._connection: Connection | None = None  # made in the middle of a loop body, whose states are not compared
        self._has_warmed_up = False  # the function was called before, for the warm-up
        self._calls = BodyCalls(
            boundary_number=lambda: state.boundary_number,
            is_in_body=self._completes_calls,
            is_connected=lambda: self._connection is not None,
            connect=self._connect_in_body,
            transport=lambda: world.current().transport,
        )

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        with self.installed(), InPhase(Phase.USER):
            return self._run(call)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Receive the requests of loader, optimizers and collectives, and make the modules of the state elastic."""
        state = self._state
        if getattr(state.loader, "has_own_bodies", False):
            refuse_sync_batch_norm(state.modules())
        adopt = factory("adoption of DDP in strict mode" if state.is_strict else "adoption of DDP")
        if adopt(state.modules(), state.optimizers(), lambda: getattr(state.loader, "accumulates", False)):
            state.track_optimizers()
        if any(map(is_shard, (each for module in state.modules() for each in module.parameters()))):
            state.shards = factory("adoption of shards")(state)
            state.track_optimizers()
        self._left_out.watch()
        SESSION.open(self, recorder=self._records, auditor=self._strict, timer=self._balance)
        agreement.install(self._calls)
        if state.loader is not None:
            state.loader.hooks = self
        try:
            with self._signals, self._strict.arithmetic():
                try:
                    yield
                except (JobEnded, SystemExit):
                    self._save_in_emergency()
                    raise
                finally:
                    with self._signals.waiting:
                        if self._checkpoints is not None:
                            self._checkpoints.close()
        finally:
            self._left_out.close()
            SESSION.close()
            agreement.install(None)
            world.interrupt_collectives(None)
            self._without_effect.close()
            if self._records is not None:
                self._records.close()
            step.close()

    def _run(self, call: Callable[[], ResultT]) -> ResultT:
        self._enter(call)
        while True:
            try:
                result = call()
                step.end_body()  # of a loop that was left by `break`
            except RecoverableError as error:
                if self._job is None:
                    raise
                logger.info("leaving the elastic function to regroup: %s", error)
            except Exception as error:
                if self._has_warmed_up and self._place is JOINED:
                    error.add_note(_SECOND_CALL)
                self._without_effect.annotate(error)
                raise
            else:
                if self._has_finished():
                    return result
            self._regroup()

    def _has_finished(self, static_because: str = "") -> bool:
        """Wait for the other workers at the end of the function. False: a regroup is due. `static_because`: as in
        Finished."""
        if self._connection is not None:
            return False
        remark_training(self._state, is_over=not static_because)
        shortfall = self._state.loader.shortfall() if self._state.loader is not None else None
        with self._signals.waiting:
            if not all_have_finished(self._job, shortfall, static_because):
                return False
            if self._checkpoints is not None and not static_because:
                self._checkpoints.at_end()
        return True

    # Entering and returning ------------------------------------------------------------------------------

    def _enter(self, call: Callable[[], object]) -> None:
        step.close()
        if self._job is not None and self._job.is_newcomer():
            reserve_memory(self._state)
            self._has_warmed_up = warm_up(self._job, self._state, call)
        with self._signals.waiting:
            self._begin()
            if self._checkpoints is not None:
                self._checkpoints.entered()

    def _begin(self) -> None:
        """Give all workers the same state: the source's; at the start of the job, rank 0's."""
        job = self._job
        self._state.capture()
        is_newcomer = job is not None and job.is_newcomer()
        if job is not None:
            job.link.send(Elastic())
        self._place = moved(self._place, JOINED if is_newcomer else BEFORE)
        if job is not None and (is_newcomer or job.has_to_regroup()):
            self._without_effect.is_untried = is_newcomer
            self._regroup()
            return
        here = world.current()
        try:
            report = self._agree(here.transport, bootstrap=not self._state.is_holder)
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

    # Requests of the loader (data/elastic_loader.py) -----------------------------------------------------------

    def reach_boundary(self) -> None:
        """Pass the boundary before a batch: the only place in the middle of an epoch where workers regroup."""
        with self._signals.waiting:
            if self._job is not None:
                self._job.link.catch_up()
                if self._job.link.is_over:
                    self._job.link.raise_if_over()
            has_to_regroup = self._has_to_regroup()
            if has_to_regroup and step.is_undecided():
                step.abort()
            if step.is_undecided() and not (step.is_aborted() or step.expects_micro_batch()):
                has_to_regroup = not self._leave_out()
            if step.expects_micro_batch() and not has_to_regroup:
                self._without_effect.begin_micro_batch()
            elif step.is_aborted():
                self._repeat(has_to_regroup)
            elif not step.is_undecided():
                if self._state.digests.is_suspicious and not has_to_regroup:
                    self._mend()
                self._strict.decided()
                self._pass_boundary()
                if has_to_regroup:
                    self._regroup()
                    self._pass_boundary()

    def _leave_out(self) -> bool:
        """Decide the step of a batch for which the loop body has made none, if it has done so on all workers: they
        leave the batch out together. False: a worker was lost meanwhile, and the step is aborted."""
        batch = step.batch()
        assert batch is not None
        try:
            prepared = self._left_out.agree(batch, self.prepared())
        except RecoverableError:
            if self._job is None:
                raise
            step.abort()
            return False
        self.agree(prepared)
        step.leave_out()
        return True

    def _repeat(self, has_to_regroup: bool) -> None:
        """Repeat the current batch, whose step is aborted."""
        repeats, is_over = self._strict.repeats(), False
        try:
            is_over = not has_to_regroup and step.is_rehearsal() and self._without_effect.end()
        except RecoverableError:
            if self._job is None:
                raise
            has_to_regroup = True
        if has_to_regroup or (self._job is not None and not (step.is_rehearsal() or repeats)):
            self._regroup()
        else:
            self._put_back()
            self._state.has_rehearsed |= is_over
            step.close()
        self._pass_boundary()

    def _put_back(self) -> None:
        """Restore what the loop body, or the code after an epoch's batches, has changed."""
        if is_repeated := step.is_undecided():
            step.take_back()
        self._without_effect.put_back(is_repeated)

    def rehearses(self) -> bool:
        """Return whether the batch that is handed out now is one without effect."""
        while True:
            try:
                return self._without_effect.begin()
            except RecoverableError as error:
                self._regroup_before_batch(error)

    def part_on_trial(self) -> tuple[int, int] | None:
        """Return the part of a batch that a run without effect has; None: the worker's own local batch."""
        return self._without_effect.part()

    def begin_shard(self, batch: Batch) -> None:
        self._strict.begin_shard(batch)

    def leave_batches(self) -> bool:
        """Leave the batches of an epoch on all workers; user code follows. False: there was a regroup."""
        with self._signals.waiting:
            here = world.current()
            try:
                self._raise_if_connected("the end of the batches")
                if not self._state.is_strict:
                    make_statistics_equal(layers_with_statistics(self._state.modules()), here.transport)
            except RecoverableError as error:
                self._regroup_before_batch(error)
                return False
            self._state.capture(is_whole=here.placement.size > 1 and self._job is not None)
            self._place = moved(self._place, BEHIND)
            return True

    def _regroup_before_batch(self, error: RecoverableError) -> None:
        """Regroup, and pass the boundary before a batch. Raises the error in a job of fixed size."""
        if self._job is None:
            raise error
        self._regroup()
        self._pass_boundary()

    def reach_epoch_end(self) -> bool:
        """Wait until every rank has resumed epochs(). False: there was a regroup instead, and the epoch is unchanged,
        or is that of the ranks that had passed already."""
        with self._signals.waiting:
            try:
                self._raise_if_connected("the end of an epoch")
                state_hash = self._strict.hash()
                digest = int(state_hash[:16], 16) if state_hash else self._watch.sample()
                place = (self._state.progress.epoch, self._state.step)
                prepared, digests = meet_at_epoch_end(*place, self.prepared(), digest)
            except RecoverableError as error:
                self._regroup_before_batch(error)
                return False
            self.agree(prepared)
            self._watch.compare(digests, is_sample=True)
            if self._state.digests.is_suspicious:
                if not self._mend():
                    self._pass_boundary()
                    return False
                state_hash = self._strict.hash()  # of the mended state
            if self._records is not None:
                self._records.epoch_ended()
            if state_hash:
                self._strict.publish(state_hash)
            return True

    def begin_epoch(self) -> None:
        """Note that the loader has moved on to the next epoch."""
        with self._signals.waiting:
            self._state.boundary_number += 1
            self._place = without_batch(self._place)
            self._state.capture()

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Run `function` once (data/elastic_loader.py). A worker that has completed it is ahead of the others."""
        state = self._state
        meet_at_call(epoch, state.step, call)
        before = state.before_change()
        function()
        with self._signals.waiting:
            state.boundary_number += 1
            state.keep_change(*before)

    def _pass_boundary(self) -> None:
        """Remember the metadata, and set the step's random numbers: a step that is repeated gets the same ones."""
        state, is_in_job = self._state, self._job is not None
        self._left_out.has_foreign_step = False
        # Workers come to their next batch on different ways, and may pass the boundary before it twice. All count it
        # once: one with another number would be taken for one that lacks something.
        if step.take_handed_out() or self._place is BEFORE or self._place is JOINED:
            state.boundary_number += 1
        if self._place is JOINED:
            state.restore_module_values()
        # Before the rehearsal the effects of the loop body are unknown.
        is_alone = not is_in_job or world.current().placement.size == 1
        is_known = state.has_rehearsed or (is_alone and not state.is_strict)
        state.capture(is_whole=not is_known)
        if self._place is not BODY:
            self._place = moved(self._place, BODY)
        self._without_effect.outside.take()
        self._strict.boundary_passed()
        self._watch.hash_due(self._checkpoints is not None and self._checkpoints.begin_if_due())
        report_boundary(self._job, state)
        self._seed_body()

    def _seed_body(self) -> None:
        """Seed the random numbers of a loop body, from (seed, step, rank)."""
        seed = self._state.loader.seed if self._state.loader is not None else 0
        reseed(seed, self._state.step, world.current().placement.rank)

    def _has_to_regroup(self) -> bool:
        return self._connection is not None or (self._job is not None and self._job.has_to_regroup())

    def _completes_calls(self) -> bool:
        """Return whether the remaining workers complete a call here after the loss of a worker."""
        return self._job is not None and step.batch() is not None

    def _raise_if_connected(self, op: str) -> None:
        """Raise GenerationEnded where a call in the loop body has connected to others, whose states still differ."""
        if self._connection is not None:
            raise GenerationEnded(op, self._connection.start.id.number, _INTERRUPTED)

    def _connect_in_body(self) -> None:
        """Connect to the remaining workers, which complete a call in the loop body after the loss of a worker. A step
        that is not reduced yet is aborted. A reduced step has the gradients of the whole global batch."""
        assert self._job is not None
        with self._signals.waiting, InPhase(Phase.REGROUPING):
            if step.status() is StepStatus.OPEN:
                step.abort()
            world.interrupt_collectives(None)
            self._connection = connect(self._job)
            world.interrupt_collectives(_INTERRUPTED)

    def _mend(self) -> bool:
        """Repair states that differ: compare all of them, and copy. False: there was a regroup instead."""
        self._state.capture()
        here = world.current()
        try:
            self._agree(here.transport, bootstrap=False, compares_all=True)
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            return False
        if self._state.loader is not None:
            self._state.loader.set_world(here.placement.rank, here.placement.size)
        return True

    def _regroup(self) -> None:
        """Move to the same state on all members of the next generation, after a fault or an agreed change."""
        with self._signals.waiting:
            assert self._job is not None
            state = self._state
            self._without_effect.drop()
            self._strict.decided()
            begun, in_flight = state.step, step.batch() if step.is_undecided() and not step.is_rehearsal() else None
            if step.is_undecided() or self._place is BEHIND:
                self._put_back()
            else:
                state.capture()  # at a boundary nothing has changed; or a collective has left the body behind its step
            step.close()
            connection, self._connection = self._connection, None
            world.interrupt_collectives(None)
            done = regroup(self._job, self._agree, connection)
            step.take_handed_out()  # the boundary behind it has been counted, or the batch comes again
            self._place = without_batch(self._place)
            here = done.connection.start.placement
            if state.loader is not None:
                state.loader.set_world(here.rank, here.size)
            if self._records is not None:
                self._records.started(done.report is not None and here.rank in done.report.behind)
            state.on_reset()  # on every member, so that the callbacks change the same everywhere
            is_redone = in_flight is not None and state.step == begun  # otherwise some worker had applied it
            samples = in_flight.global_batch.global_samples if in_flight is not None and is_redone else 0
            report_first_step(self._job, done, state.step, "step", int(is_redone), samples)
            self._without_effect.regrouped(here.size)
            done.log(f"step {state.step}")

    def _agree(self, transport: Transport, bootstrap: bool, compares_all: bool = False) -> SyncReport:
        if self._checkpoints is not None:
            self._checkpoints.before_sync(transport.rank, bootstrap)
        balance = self._balance
        note = (int(self._without_effect.is_untried), *(balance.note() if balance is not None else ()))
        gather = partial(self._calls.gather_at_boundaries, transport)
        report = synchronize(self._state, transport, bootstrap, compares_all, note, gather)
        if self._state.shards is not None:
            self._state.shards.follow(transport)
        self._watch.synchronized(report)
        self._without_effect.note_newcomers(tuple(rank for rank, each in enumerate(report.notes) if each[0]))
        if balance is not None:
            self._state.loader.meet([each[1:] for each in report.notes], transport.rank)
        return report

    @property
    def _balance(self) -> Balance | None:
        """The division of global batches by the speed of the workers; None: they are divided evenly."""
        return getattr(self._state.loader, "balance", None)

    # The job ends unfinished -----------------------------------------------------------------------------

    def _save_in_emergency(self) -> None:
        if world.is_forked_child():  # the worker itself goes on
            return
        with self._signals.waiting:
            if step.is_undecided() or self._place is BEHIND:
                self._put_back()
            if self._checkpoints is not None:
                self._checkpoints.in_emergency()

    # Requests of the optimizer (state/session.py) -------------------------------------------------------

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
        self._watch.compare_headers(digests_by_rank, has_any_saved)

    def receives_updates(self) -> bool:
        return True  # the loader notices planned changes, and no worker has to leave the function for one
