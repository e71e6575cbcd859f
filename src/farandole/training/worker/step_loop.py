"""The run loop of the step rule: faults and planned changes are absorbed in place, at the step in which they occur."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole.base.env import read_job_env
from farandole.base.liveness import status_reporting
from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase, Shortfall
from farandole.base.wire.messages import Elastic, StateHashed, StragglerSeen, Synced
from farandole.errors import (
    CollectiveMismatch,
    ConfigError,
    GenerationEnded,
    JobEnded,
    RecoverableError,
    StepError,
)
from farandole.registry import factory
from farandole.training.collectives import agreement, world
from farandole.training.collectives.advice import DECIDE_TOGETHER
from farandole.training.collectives.transport import Transport
from farandole.training.data.elastic_loader import has_compiled
from farandole.training.data.padding import without_step
from farandole.training.optim.buckets import reserve
from farandole.training.optim.distributed_optimizer import ReducingOptimizer
from farandole.training.state import loop_hooks, step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.loop_hooks import HostUpdateResult
from farandole.training.state.rehearsal import Rehearsal
from farandole.training.state.step import StepStatus
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import SyncReport, synchronize
from farandole.training.state.watched_tensors import layers_with_statistics, make_statistics_equal
from farandole.training.worker.checkpoints import checkpoints
from farandole.training.worker.leaving import all_have_finished, leaving_on_sigterm
from farandole.training.worker.loss_trial import LossTrial
from farandole.training.worker.newcomer_trial import Trial, Tried, judge, judge_twice
from farandole.training.worker.process_setup import map_memory_ahead
from farandole.training.worker.sample_records import sample_records
from farandole.training.worker.state_watch import StateWatch
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.warm_up import is_plain, warm_up
from farandole.training.worker.worker_job import WorkerJob
from farandole.training.worker.worker_recovery import BodyCalls, Connection, connect, regroup, report_first_step

if TYPE_CHECKING:
    from farandole.training.data.balance import Balance
    from farandole.training.state.numerics import LayerTrace
    from farandole.training.worker.shard_inquiry import ShardInquiry

logger = logging.getLogger("farandole")


ResultT = TypeVar("ResultT")


_ONCE = struct.Struct("<3q")  # epoch, decided steps, number of the call
_LEFT_OUT = struct.Struct("<6qQ")  # decided steps, epoch, start, stop, samples of the rank, prepared, hash
_MOST_AT_START = 16
"""Batches that may be left out before the first one is trained."""
_EPOCH_END = struct.Struct("<3qQ")  # epoch, decided steps, prepared, digest
_SECOND_CALL = (
    "Farandole has called this elastic function before, on this worker, to warm up before the worker joined. Code "
    "before its loop must work in a second call, too; TorchState(rehearse=False) skips the warm-up"
)
_REHEARSED = (
    "This run of the loop body was a rehearsal, with a part of a batch: the loss of a worker brings batches of other "
    "sizes, too. Give DataLoader(min_local_batch=...) if the body needs so many samples; TorchState(rehearse=False) "
    "leaves rehearsals out"
)
_NO_MEAN = (
    "the gradient of a batch is not the mean of those of its samples, so that each number of workers trains something "
    "else"
)
_OTHER_DATA = (
    "sample {} of the data set is not the same on all workers, as where random numbers without a seed have made it: "
    "workers train samples of their own"
)
_INTERRUPTED = "a worker was lost in this run of the loop body; other ranks take part again after it"


class StepLoop:
    """A call of an elastic function. It answers the requests of loader and optimizer at each boundary."""

    def __init__(self, job: WorkerJob | None, state: StepState) -> None:
        self._job = job
        self._state = state
        self._records = sample_records(state)
        self._checkpoints = checkpoints(job, state, "step")
        self._watch = StateWatch(job, state, self._records, self._checkpoints)
        self._has_foreign_step = False  # since the last boundary, an optimizer has stepped that is not Farandole's
        self._is_busy = False  # the run loop, not user code, changes the state
        self._connection: Connection | None = None  # made in the middle of a loop body, whose states are not compared
        self._rehearsal: Rehearsal | None = None  # the loop body runs with a batch whose step is aborted on purpose
        self._is_rehearsed = False  # it is over
        self._loss_trial: LossTrial | None = None  # the loop body runs with a batch whose gradients are compared
        self._is_untried = False  # it is a newcomer that has not run a loop body with the others yet
        self._newcomers: tuple[int, ...] = ()  # ranks of those
        self._newcomer_trial: Trial | None = None  # they run it now
        self._first_tried = list[Tried]()  # the results of the first of two trials
        self._size_of_trial = 0  # number of workers with which each step is another one than with others; 0: none
        self._is_second_call = False  # the function was called for the warm-up, and now has not come to its loader yet
        self._is_new_boundary = True  # before the first batch of the function, of an epoch, or after a regroup
        self._has_joined = False  # it is a newcomer that has not come to its first batch yet
        self._is_behind_batches = False  # user code runs between the last batch of an epoch and the next epoch
        self._inquiry = _inquiry(job, state) if state.is_strict else None
        self._values = factory("values of a loop")(state) if job is not None and state.rehearse else None
        asked = read_job_env().hash_every if state.hash_every is None else state.hash_every
        self._hash_every = asked if state.is_strict else 0
        self._hashed_at = 0  # the step whose state was hashed last
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
            _refuse_for_own_bodies(state)
        adopt = factory("adoption of DDP in strict mode" if state.is_strict else "adoption of DDP")
        if adopt(state.modules(), state.optimizers(), self._accumulates):
            state.track_optimizers()
        foreign = register_optimizer_step_post_hook(self._note_foreign_step)
        loop_hooks.install(self)
        agreement.install(self._calls)
        loop_hooks.install_recorder(self._records)
        loop_hooks.install_auditor(self._inquiry)
        loop_hooks.install_timer(self._balance)
        if state.loader is not None:
            state.loader.hooks = self
        try:
            with leaving_on_sigterm(self._job, self._may_end_here), _deterministic(self._state.is_strict):
                try:
                    yield
                except (JobEnded, SystemExit):
                    self._save_in_emergency()
                    raise
                finally:
                    if self._checkpoints is not None:
                        self._checkpoints.close()
        finally:
            foreign.remove()
            loop_hooks.install(None)
            agreement.install(None)
            world.interrupt_collectives(None)
            loop_hooks.install_recorder(None)
            loop_hooks.install_auditor(None)
            loop_hooks.install_timer(None)
            self._drop_trial()
            if self._values is not None:
                self._values.forget()
            if self._records is not None:
                self._records.close()
            step.close()

    def _accumulates(self) -> bool:
        return bool(getattr(self._state.loader, "accumulates", False))

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
                if self._is_second_call:
                    error.add_note(_SECOND_CALL)
                if self._loss_trial is not None:
                    error.add_note(_REHEARSED)
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
        self._remark(is_over=not static_because)
        if not all_have_finished(self._job, self._shortfall(), static_because):
            return False
        if self._checkpoints is not None and not static_because:
            self._checkpoints.at_end()
        return True

    def _remark(self, is_over: bool) -> None:
        """Say in the last line of the job what was not trained, and that a model is of no use. `is_over`: the script
        does not train further, as a static job."""
        named = (each for module in self._state.modules() for each in module.named_parameters())
        if bad := next((name for name, each in named if not _is_finite(each)), ""):
            world.remark("finite parameters", f"the parameter {bad} is not finite (NaN or infinite)")
        record, steps = getattr(self._state.loader, "record", None), self._state.step
        if record is None:
            return
        if record.skipped == steps and (is_over or steps):
            world.remark("skipped steps", "nothing was trained")
        elif record.skipped:
            world.remark("skipped steps", f"{record.skipped} of {steps} steps trained nothing, and were skipped")
        if record.partial:
            text = f"in {record.partial} of {steps} steps some samples had no backward pass"
            world.remark("partial steps", text)

    def _shortfall(self) -> Shortfall | None:
        return self._state.loader.shortfall() if self._state.loader is not None else None

    # Entering and returning ------------------------------------------------------------------------------

    def _enter(self, call: Callable[[], object]) -> None:
        self._is_busy = True
        self._begin(call)
        if self._checkpoints is not None:
            self._checkpoints.entered()
        self._is_busy = False

    def _begin(self, call: Callable[[], object]) -> None:
        """Give all workers the same state: the source's; at the start of the job, rank 0's."""
        job = self._job
        step.close()
        if job is not None and job.is_newcomer():
            self._get_ready(job, call)
        self._state.capture()
        if job is not None:
            job.link.send(Elastic())
        if job is not None and (job.is_newcomer() or job.has_to_regroup()):
            self._has_joined = self._is_untried = job.is_newcomer()
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

    def _get_ready(self, job: WorkerJob, call: Callable[[], object]) -> None:
        """Prepare a newcomer as far as possible before the others wait for it."""
        map_memory_ahead(self._state.modules())
        for optimizer in self._state.optimizers():
            if isinstance(optimizer, ReducingOptimizer):
                reserve(parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._state.loader is not None:
            self._state.loader.warm_up()
        self._is_busy = False
        self._is_second_call = self._warm_up(job, call)
        self._is_busy = True

    def _warm_up(self, job: WorkerJob, call: Callable[[], object]) -> bool:
        """Run the loop body without effect. Returns whether `call` was called."""
        return warm_up(job, self._state, call)

    # Requests of the loader (data/elastic_loader.py) -----------------------------------------------------------

    def reach_boundary(self) -> None:
        """Pass the boundary before a batch: each next(loader). The only place in the middle of an epoch where workers
        regroup."""
        if self._job is not None:
            self._job.link.catch_up()
            if self._job.link.is_over:
                self._job.link.raise_if_over()
        self._is_busy = True
        has_to_regroup = self._has_to_regroup()
        if has_to_regroup and step.is_undecided():
            step.abort()
        if step.is_undecided() and not (step.is_aborted() or step.expects_micro_batch()):
            has_to_regroup = not self._leave_out()
        if step.expects_micro_batch() and not has_to_regroup:
            rehearsal = self._rehearsal if self._state.is_strict else None
            if rehearsal is not None:
                rehearsal.end_run()
            self._state.begin_micro_batch()
            if rehearsal is not None:
                rehearsal.begin_run()
        elif step.is_undecided():
            self._repeat(has_to_regroup)
        else:
            if self._state.digests.is_suspicious and not has_to_regroup:
                self._mend()
            if self._inquiry is not None:
                self._inquiry.forget()
            self._pass_boundary()
            if has_to_regroup:
                self._regroup()
                self._pass_boundary()
        self._is_busy = False

    def _leave_out(self) -> bool:
        """Decide the step of a batch for which the loop body has made none, if it has done so on all workers: they
        leave the batch out together. False: a worker was lost meanwhile, and the step is aborted."""
        batch = step.batch()
        assert batch is not None
        global_batch, here = batch.global_batch, world.current()
        self._refuse_to_leave_out(global_batch)
        ids = loop_hooks.record_intended(batch)
        place = (self._state.step, global_batch.epoch, global_batch.start, global_batch.stop)
        try:
            self._raise_if_connected("leaving a batch out")
            trailers = here.transport.all_gather(_LEFT_OUT.pack(*place, global_batch.samples, self.prepared(), ids))
        except CollectiveMismatch as error:
            raise CollectiveMismatch(
                f"this worker has left out samples [{place[2]}, {place[3]}) of epoch {place[1]}, by a loop body "
                f"without optimizer.step(), and other workers have not: {error}. Decide it alike on all workers, as "
                f"by `if fd.any(is_bad): continue`"
            ) from error
        except RecoverableError:
            if self._job is None:
                raise
            step.abort()
            return False
        by_rank = [_LEFT_OUT.unpack(each) if len(each) == _LEFT_OUT.size else () for each in trailers]
        if any(each[:4] != place for each in by_rank):
            raise CollectiveMismatch(f"workers left out different batches; (step, epoch, samples) by rank: {by_rank}")
        loop_hooks.record_agreed(sum(each[4] for each in by_rank), sum(each[6] for each in by_rank) % 2**64)
        self.agree([each[5] for each in by_rank])
        step.leave_out()
        return True

    def _note_foreign_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note that an optimizer of torch has stepped: it trains this worker's part only."""
        self._has_foreign_step |= not hasattr(optimizer, "abandon_step")

    def _refuse_to_leave_out(self, global_batch: GlobalBatch) -> None:
        """Raise StepError where it is more likely that the script forgets its steps: no batch was trained yet."""
        record = getattr(self._state.loader, "record", None)
        left_out = 0 if record is None else record.skipped
        if self._has_foreign_step:
            raise StepError(without_step(global_batch, step.status()))
        if left_out < self._state.step:
            return
        samples = self._state.loader.epoch_samples
        is_epoch = 0 < samples <= global_batch.stop and not (global_batch.epoch or global_batch.start == 0)
        if left_out >= _MOST_AT_START or is_epoch or not step.is_noticed():
            raise StepError(without_step(global_batch, step.status()))

    def _repeat(self, has_to_regroup: bool) -> None:
        """Repeat the current batch, which was not trained, or have the loader refuse to continue."""
        if not step.is_aborted():
            return
        is_inquiry = self._inquiry is not None and not step.is_rehearsal() and self._inquiry.goes_on()
        is_over = False
        try:
            is_over = not has_to_regroup and step.is_rehearsal() and self._end_rehearsal()
        except RecoverableError:
            if self._job is None:
                raise
            has_to_regroup = True
        if has_to_regroup or (self._job is not None and not (step.is_rehearsal() or is_inquiry)):
            self._regroup()
        else:
            self._put_back()
            self._state.has_rehearsed |= is_over
            step.close()
        self._pass_boundary()

    def _end_rehearsal(self) -> bool:
        """Return whether no further rehearsal follows, after agreement with the other workers. Raises
        RecoverableError."""
        trial = self._loss_trial
        if self._newcomer_trial is not None:
            return self._compare_newcomers(self._newcomer_trial)
        if trial is None:
            self._is_rehearsed = self._rehearsal is not None
            return self._is_rehearsed and self._state.is_strict
        self._raise_if_connected("the rehearsal")
        here = replace(world.current(), told_size=None)
        world.enter(here)
        trial.take(here.transport, getattr(self._state.loader, "rows_on_trial", {}))
        if not trial.is_over():
            return False
        self._loss_trial = None
        if sample := trial.differing_sample():
            world.remark("data", _OTHER_DATA.format(sample))
        if found := trial.judge():
            self._size_of_trial = here.placement.size
            if here.placement.rank == 0:
                logger.warning("%s; %s. See docs/your-loop.md", _NO_MEAN, found)
            if self._balance is not None:
                world.remark("loss", _NO_MEAN)
        return True

    def _compare_newcomers(self, trial: Trial) -> bool:
        """Say in the last line of the job if newcomers do not train as the others do. Returns whether no further trial
        is due: what differs is tried twice, since the loop body may have random numbers of its own. Raises
        RecoverableError."""
        self._raise_if_connected("the trial of a newcomer")
        here = world.current()
        tried = trial.end(here.placement.rank in self._newcomers, "")
        self._newcomer_trial, self._state.on_step = None, None
        by_rank = here.transport.all_gather(msgspec.msgpack.encode(tried))
        results = [msgspec.msgpack.decode(each, type=Tried) for each in by_rank]
        first, self._first_tried = self._first_tried or results, []
        verdict = judge(first) if first is results else judge_twice(first, results)
        if verdict.refused and first is results:
            self._first_tried = results
            return False
        self._newcomers, self._is_untried = (), False
        if verdict.refused:
            text = (
                f"a newcomer does not train as the other workers do: {verdict.difference}. What the loop has outside "
                f"its TorchState, a newcomer has not: put it there, or compute it from what is there"
            )
            world.remark("newcomer", text)
        return True

    def _drop_trial(self) -> None:
        self._first_tried = []
        if self._newcomer_trial is not None:
            self._newcomer_trial.end(False, "")
            self._newcomer_trial, self._state.on_step = None, None
        self._is_rehearsed = False
        if self._loss_trial is not None:
            self._loss_trial.drop()
            self._loss_trial = None
            world.enter(replace(world.current(), told_size=None))

    def _put_back(self) -> None:
        """Restore what the loop body, or the code after an epoch's batches, has changed."""
        if step.is_undecided():
            step.take_back()
            if self._values is not None:
                self._values.roll_back()
        if self._rehearsal is None:
            self._state.put_back()
        else:
            rehearsal, self._rehearsal, self._state.on_step = self._rehearsal, None, None
            rehearsal.end()

    def rehearses(self) -> bool:
        """Return whether the batch that is handed out now is a rehearsal's: on all workers, the second one of the job.
        In the first one an average of weights is equal to them, and a change of it would not be seen. A worker alone
        needs it in strict mode, in which it may run the loop body several times for a step."""
        state, here = self._state, world.current()
        if self._newcomers and state.has_rehearsed and _may_try_newcomers(state):
            self._begin_trial()
            self._newcomer_trial = Trial(state)
            state.on_step = self._newcomer_trial.look
            reseed(state.loader.seed, state.step, 0)
            return True
        if state.has_rehearsed or state.step == 0 or (self._job is None and not state.is_strict):
            return False
        self._begin_trial()
        if self._loss_trial is None and not self._is_rehearsed:
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

    def _begin_trial(self) -> None:
        if self._values is not None:
            self._values.begin_trial()

    def part_on_trial(self) -> tuple[int, int] | None:
        """Return the part of a batch that the rehearsal has; None: the worker's own local batch."""
        if self._newcomer_trial is not None:
            return 0, 1
        return self._loss_trial.part if self._loss_trial is not None else None

    def begin_shard(self, batch: Batch) -> None:
        """Seed the random numbers of a loop body in strict mode, from (seed, step, shard)."""
        global_batch = batch.global_batch
        assert global_batch.division is not None
        self._layer_trace().begin(batch.shard)
        shard = batch.shard if batch.shard >= 0 else global_batch.division.shards + global_batch.place
        reseed(self._state.loader.seed, self._state.step, shard)

    def _layer_trace(self) -> LayerTrace:
        from farandole.training.state.numerics import layer_trace  # loaded only in strict mode

        return layer_trace

    def leave_batches(self) -> bool:
        """Leave the batches of an epoch on all workers; user code follows. False: there was a regroup."""
        here = world.current()
        self._is_busy = True
        try:
            self._raise_if_connected("the end of the batches")
            if not self._state.is_strict:
                make_statistics_equal(layers_with_statistics(self._state.modules()), here.transport)
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            self._pass_boundary()
            self._is_busy = False
            return False
        self._state.capture(is_whole=here.placement.size > 1 and self._job is not None)
        self._is_behind_batches = True
        self._is_busy = False
        return True

    def reach_epoch_end(self) -> bool:
        """Wait until every rank has resumed epochs(). False: there was a regroup instead, and the epoch is unchanged,
        or is that of the ranks that had passed already."""
        state = self._state
        epoch = state.progress.epoch
        try:
            self._raise_if_connected("the end of an epoch")
            state_hash = state.hash() if state.is_strict else ""
            digest = int(state_hash[:16], 16) if state_hash else self._watch.sample()
            trailer = _EPOCH_END.pack(epoch, state.step, self.prepared(), digest)
            trailers = world.current().transport.all_gather(trailer)
        except CollectiveMismatch as error:
            raise CollectiveMismatch(
                f"this worker has ended epoch {epoch} after step {state.step}, and another one has not ({error}): all "
                f"workers have to leave the loop over the batches together. {DECIDE_TOGETHER}"
            ) from error
        except RecoverableError:
            if self._job is None:
                raise
            self._regroup()
            self._pass_boundary()
            return False
        by_rank = [_EPOCH_END.unpack(trailer) for trailer in trailers]
        if any(each[:2] != by_rank[0][:2] for each in by_rank):
            raise CollectiveMismatch(
                f"workers ended different epochs; (epoch, step) by rank: {[each[:2] for each in by_rank]}"
            )
        self.agree([each[2] for each in by_rank])
        self._watch.compare([each[3] for each in by_rank], is_sample=True)
        if state.digests.is_suspicious:
            if not self._mend():
                self._pass_boundary()
                return False
            state_hash = state_hash and state.hash()  # of the mended state
        if self._records is not None:
            self._records.epoch_ended()
        if state_hash:
            self._publish_hash(state_hash)
        return True

    def _publish_hash(self, state_hash: str) -> None:
        """Write the hash of the state to the ledger and, as rank 0, to the events of the job."""
        state, here = self._state, world.current()
        self._hashed_at = state.step
        if self._records is not None:
            self._records.hashed(state_hash)
        if self._job is not None and here.placement.rank == 0:
            self._job.link.send(StateHashed(here.id.number, state.step, state.progress.epoch, state_hash))

    def begin_epoch(self) -> None:
        """Note that the loader has moved on to the next epoch."""
        self._state.boundary_number += 1
        self._is_new_boundary = True
        self._state.capture()
        self._is_behind_batches = False

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Run `function` once, as described in data/elastic_loader.py. A worker that has completed it is ahead of the
        others."""
        state = self._state
        here = (epoch, state.step, call)
        by_rank = [_ONCE.unpack(trailer) for trailer in world.current().transport.all_gather(_ONCE.pack(*here))]
        if any(each != here for each in by_rank):
            raise CollectiveMismatch(
                f"epoch.once() was called at different places; (epoch, step, number of the call) by rank: {by_rank}"
            )

        def call_once() -> None:
            function()
            state.boundary_number += 1

        state.capture_after(call_once)

    def _pass_boundary(self) -> None:
        """Remember the metadata, and set the step's random numbers: a step that is repeated gets the same ones."""
        state, self._is_second_call, self._has_foreign_step = self._state, False, False
        # Workers come to their next batch on different ways, and may pass the boundary before it twice. All count it
        # once: one with another number would be taken for one that lacks something.
        if step.take_handed_out() or self._is_new_boundary:
            state.boundary_number += 1
        self._is_new_boundary = False
        if self._has_joined:
            state.restore_module_values()
        self._has_joined = False
        # Before the rehearsal the effects of the loop body are unknown.
        is_alone = self._job is None or world.current().placement.size == 1
        is_known = state.has_rehearsed or (is_alone and not state.is_strict)
        state.capture(is_whole=not is_known)
        self._is_behind_batches = False
        if self._values is not None:
            self._values.take()
        if self._hash_every and state.step % self._hash_every == 0 and state.step != self._hashed_at:
            self._publish_hash(state.hash())
        self._watch.hash_due(self._checkpoints is not None and self._checkpoints.begin_if_due())
        if self._balance is not None:
            self._report_stragglers(self._balance)
        number, loader = world.current().id.number, state.loader
        if loader is None:
            status_reporting.set_step(number, state.step)
        else:
            trained, samples = loader.cursor, getattr(loader, "epoch_samples", 0)
            status_reporting.set_step(number, state.step, loader.epoch, min(trained, samples or trained), samples)
        self._seed_body()

    def _seed_body(self) -> None:
        """Seed the random numbers of a loop body, from (seed, step, rank)."""
        seed = self._state.loader.seed if self._state.loader is not None else 0
        reseed(seed, self._state.step, world.current().placement.rank)

    def _report_stragglers(self, balance: Balance) -> None:
        """Tell the coordinator, as rank 0, of the workers that have become stragglers, or are none any more."""
        here = world.current()
        for rank, percent, is_slow in balance.take_changes():
            if here.placement.rank == 0 and self._job is not None:
                self._job.link.send(StragglerSeen(here.id.number, self._state.step, rank, percent, is_slow))
            elif here.placement.rank == 0:
                logger.warning("rank %d computes at %d %% of the others' speed", rank, percent)

    def _has_to_regroup(self) -> bool:
        return self._connection is not None or (self._job is not None and self._job.has_to_regroup())

    def _completes_calls(self) -> bool:
        """Return whether the remaining workers complete a call here after the loss of a worker."""
        return self._job is not None and step.batch() is not None

    def _raise_if_connected(self, op: str) -> None:
        """Raise GenerationEnded where a call in the loop body has connected to a generation whose states still
        differ."""
        if self._connection is not None:
            raise GenerationEnded(op, self._connection.start.id.number, _INTERRUPTED)

    def _connect_in_body(self) -> None:
        """Connect to the remaining workers, which complete a call in the loop body after the loss of a worker. A step
        that is not reduced yet is aborted. A reduced step has the gradients of the whole global batch."""
        assert self._job is not None
        was_busy, self._is_busy = self._is_busy, True
        if step.status() is StepStatus.OPEN:
            step.abort()
        with InPhase(Phase.REGROUPING):
            world.interrupt_collectives(None)
            self._connection = connect(self._job)
            world.interrupt_collectives(_INTERRUPTED)
        self._is_busy = was_busy

    def _mend(self) -> bool:
        """Repair states that differ, as all workers know: compare all of the state, and copy it. False: there was a
        regroup instead."""
        self._is_busy = True
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
        self._is_busy = False
        return True

    def _regroup(self) -> None:
        """Move to the same state on all members of the next generation, after a fault or an agreed change."""
        assert self._job is not None
        state, self._is_busy = self._state, True
        self._drop_trial()
        if self._inquiry is not None:
            self._inquiry.forget()
        begun, in_flight = state.step, step.batch() if step.is_undecided() and not step.is_rehearsal() else None
        if step.is_undecided() or self._is_behind_batches:
            self._put_back()
        else:
            state.capture()  # at a boundary nothing has changed; or a collective has left the loop body behind its step
        step.close()
        connection, self._connection = self._connection, None
        world.interrupt_collectives(None)
        done = regroup(self._job, self._agree, connection)
        step.take_handed_out()  # the boundary behind it has been counted, or the batch comes again
        self._is_new_boundary = True
        if state.loader is not None:
            state.loader.set_world(done.rank, done.size)
        if self._records is not None:
            self._records.started(done.report is not None and done.rank in done.report.behind)
        state.on_reset()  # on every member, so that the callbacks change the same everywhere
        if in_flight is not None and state.step == begun:
            report_first_step(self._job, done, state.step, "step", 1, in_flight.global_batch.global_samples)
        else:  # no step was in flight, or some worker had applied it
            report_first_step(self._job, done, state.step, "step")
        if self._size_of_trial not in (0, done.size):
            world.remark("loss", _NO_MEAN)
        done.log(f"step {state.step}")
        self._is_busy = False

    def _agree(self, transport: Transport, bootstrap: bool, compares_all: bool = False) -> SyncReport:
        if self._checkpoints is not None:
            self._checkpoints.before_sync(transport.rank, bootstrap)
        balance = self._balance
        note = (int(self._is_untried), *(balance.note() if balance is not None else ()))
        gather = partial(self._calls.gather_at_boundaries, transport)
        report = synchronize(self._state, transport, bootstrap, compares_all, note, gather)
        self._watch.synchronized(report)
        self._newcomers = tuple(rank for rank, each in enumerate(report.notes) if each[0])
        if self._newcomers and self._values is not None:
            self._values.note_newcomer()
        if balance is not None:
            self._state.loader.meet([each[1:] for each in report.notes], transport.rank)
        return report

    @property
    def _balance(self) -> Balance | None:
        """The division of global batches by the speed of the workers; None: they are divided evenly."""
        return getattr(self._state.loader, "balance", None)

    # The job ends unfinished -----------------------------------------------------------------------------

    def _may_end_here(self) -> bool:
        """Return whether the state is complete at the main thread's position: it is not while a step is being
        applied."""
        return not self._is_busy and step.status() is not StepStatus.REDUCED

    def _save_in_emergency(self) -> None:
        self._is_busy = True
        if step.is_undecided() or self._is_behind_batches:
            self._put_back()
        if self._checkpoints is not None:
            self._checkpoints.in_emergency()

    # Requests of the optimizer (state/loop_hooks.py) -------------------------------------------------------

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
        return True

    def agreed_update(self) -> HostUpdateResult | None:
        return None  # The loader notices planned changes, and no worker has to leave the function for one.

    def committing(self) -> None:
        """Do nothing: every step is a commit here."""

    def committed(self) -> None:
        """Do nothing: every step is a commit here."""


@torch.no_grad()
def _is_finite(parameter: torch.nn.Parameter) -> bool:
    """Return whether all values of a parameter are finite; True for one whose values cannot be looked at."""
    is_usual = parameter.layout is torch.strided and parameter.device.type != "meta"
    return not is_usual or bool(torch.isfinite(parameter).all())


def _inquiry(job: WorkerJob | None, state: StepState) -> ShardInquiry:
    from farandole.training.worker.shard_inquiry import ShardInquiry  # loaded only in strict mode

    return ShardInquiry(job, state, state.loader.draw_audits)


def _may_try_newcomers(state: StepState) -> bool:
    """Return whether all workers may run a loop body with the same batch, which has another size than their own: not
    where it would be compiled for that."""
    return state.rehearse and not state.is_strict and is_plain(state) and not has_compiled()


def _refuse_for_own_bodies(state: StepState) -> None:
    """Raise ConfigError for layers of which each forward pass waits for the other workers."""
    for module in state.modules():
        if any(type(each).__name__ == "SyncBatchNorm" for each in module.modules()):
            raise ConfigError(
                "balance with several loop bodies for a global batch, and SyncBatchNorm: workers would run its forward "
                "pass a different number of times, and wait for each other; leave balance, or max_local_batch and "
                "micro_batch_size, out, or use BatchNorm"
            )


def _deterministic(is_strict: bool) -> AbstractContextManager[None]:
    if not is_strict:
        return nullcontext()
    from farandole.training.state.numerics import deterministic, own_arithmetic  # loaded only in strict mode

    own_arithmetic()  # before other workers wait for it
    return deterministic()
