"""What the run loop does besides in strict mode: shards with random numbers of their own, audits, and hashes of the
state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from farandole.base.env import read_job_env
from farandole.base.wire.link_messages import StateHashed
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.step_state import StepState
from farandole.training.worker.sample_records import SampleRecords
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.worker_job import WorkerJob

if TYPE_CHECKING:
    from farandole.training.worker.shard_inquiry import ShardInquiry


def strict_steps(job: WorkerJob | None, state: StepState, records: SampleRecords | None) -> UsualSteps:
    return StrictSteps(job, state, records) if state.is_strict else UsualSteps()


class UsualSteps:
    """Nothing: the mode is not strict."""

    auditor: ShardInquiry | None = None

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return a context in which the arithmetic of this process is that of any other one, as far as it is set."""
        return nullcontext()

    def begin_shard(self, batch: Batch) -> None:
        """Seed the random numbers of a loop body, from (seed, step, shard)."""

    def repeats(self) -> bool:
        """Return, after a step without effect, whether the batch comes again on the same workers."""
        return False

    def decided(self) -> None:
        """Note that the step was made, or that the workers are others."""

    def boundary_passed(self) -> None:
        """Publish the hash of the state, if it is due."""

    def hash(self) -> str:
        """Return the hash of the state, which has to be published when all workers have compared it; empty: none."""
        return ""

    def publish(self, state_hash: str) -> None:
        """Write the hash of the state to the ledger and, as rank 0, to the events of the job."""


class StrictSteps(UsualSteps):
    """Those of one worker."""

    def __init__(self, job: WorkerJob | None, state: StepState, records: SampleRecords | None) -> None:
        from farandole.training.worker.shard_inquiry import ShardInquiry  # loaded only in strict mode

        self._job, self._state, self._records = job, state, records
        self.auditor = self._inquiry = ShardInquiry(job, state, state.loader.draw_audits)
        self._hash_every = read_job_env().hash_every if state.hash_every is None else state.hash_every
        self._hashed_at = 0  # the step whose state was hashed last

    def arithmetic(self) -> AbstractContextManager[None]:
        from farandole.training.state.numerics import deterministic, own_arithmetic  # loaded only in strict mode

        own_arithmetic()  # before other workers wait for it
        return deterministic()

    def begin_shard(self, batch: Batch) -> None:
        from farandole.training.state.numerics import layer_trace  # loaded only in strict mode

        global_batch = batch.global_batch
        assert global_batch.division is not None
        layer_trace.begin(batch.shard)
        shard = batch.shard if batch.shard >= 0 else global_batch.division.shards + global_batch.place
        reseed(self._state.loader.seed, self._state.step, shard)

    def repeats(self) -> bool:
        return not step.is_rehearsal() and self._inquiry.goes_on()

    def decided(self) -> None:
        self._inquiry.forget()

    def boundary_passed(self) -> None:
        state = self._state
        if self._hash_every and state.step % self._hash_every == 0 and state.step != self._hashed_at:
            self.publish(state.hash())

    def hash(self) -> str:
        return self._state.hash()

    def publish(self, state_hash: str) -> None:
        state, here = self._state, world.current()
        self._hashed_at = state.step
        if self._records is not None:
            self._records.hashed(state_hash)
        if self._job is not None and here.placement.rank == 0:
            self._job.link.send(StateHashed(here.id.number, state.step, state.progress.epoch, state_hash))
