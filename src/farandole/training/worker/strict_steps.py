"""What the run loop does besides in strict mode: shards with random numbers of their own, hashes of the state, and the
worker's side of audits. When results of a shard differ, the step comes again until the rank is known that was wrong,
which then ends.

state/shard_audit.py, which is pure, draws the audits and judges. All ranks hear the same results, in the step header,
and so come to the same conclusion.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from farandole.base.env import read_job_env
from farandole.base.wire.link_messages import ShardDiffered, StateHashed
from farandole.errors import ShardsDiffer, WrongResult
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import Auditor
from farandole.training.state.step_state import StepState
from farandole.training.worker.sample_records import SampleRecords
from farandole.training.worker.step_randomness import reseed
from farandole.training.worker.worker_job import WorkerJob

if TYPE_CHECKING:
    from farandole.training.state.shard_audit import Finding, Inquiry

logger = logging.getLogger("farandole")


def strict_steps(job: WorkerJob | None, state: StepState, records: SampleRecords | None) -> UsualSteps:
    return StrictSteps(job, state, records) if state.is_strict else UsualSteps()


class UsualSteps(Auditor):
    """Nothing: the mode is not strict."""

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return a context in which the arithmetic of this process is that of any other one, as far as it is set."""
        return nullcontext()

    def begin_shard(self, batch: Batch) -> None:
        """Seed the random numbers of a loop body, from (seed, step, shard)."""

    def repeats(self) -> bool:
        """Return, after a step without effect, whether the batch comes again on all ranks, for an inquiry that goes on.
        False: there is none, or a rank has ended because of it, which the others lose.

        Raises:
            WrongResult: On the rank that was wrong; on all, where it is not known which one was.
        """
        return False

    def decided(self) -> None:
        """Note that the step was made, or that the workers are others: an inquiry ends."""

    def boundary_passed(self) -> None:
        """Publish the hash of the state, if it is due."""

    def hash(self) -> str:
        """Return the hash of the state, which has to be published when all workers have compared it; empty: none."""
        return ""

    def publish(self, state_hash: str) -> None:
        """Write the hash of the state to the ledger and, as rank 0, to the events of the job."""


class StrictSteps(UsualSteps):
    """Those of one worker. In a job of fixed size no step can be repeated: results that differ end it."""

    def __init__(self, job: WorkerJob | None, state: StepState, records: SampleRecords | None) -> None:
        self._job, self._state, self._records = job, state, records
        self._hash_every = read_job_env().hash_every if state.hash_every is None else state.hash_every
        self._hashed_at = 0  # the step whose state was hashed last
        self._inquiry: Inquiry | None = None
        self._finding: Finding | None = None
        self._place = 0  # of the reduction whose results differed, among those of the step: each optimizer has one
        self._global_batch: GlobalBatch | None = None
        self._reductions = 0  # of this global batch

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

    # Audits ----------------------------------------------------------------------------------------------

    def compare(self, global_batch: GlobalBatch, own: Sequence[int], again: Sequence[int]) -> None:
        from farandole.training.state.shard_audit import Inquiry  # loaded only in strict mode

        audit = global_batch.audit
        assert audit is not None
        if global_batch is not self._global_batch:
            self._global_batch, self._reductions = global_batch, 0
        self._reductions += 1
        if self._inquiry is None:
            inquiry = Inquiry(audit, own, again)
            if not inquiry.is_open:
                return
            self._inquiry, self._place = inquiry, self._reductions
            what = self._what(inquiry, audit.shards)
            logger.log(logging.WARNING if world.current().placement.rank == 0 else logging.DEBUG, what)
            raise ShardsDiffer(what)
        if self._reductions == self._place:
            self._finding = self._inquiry.hear(audit, own, again)
            raise ShardsDiffer("a step was computed to find out which rank is wrong, and is not applied")

    def repeats(self) -> bool:
        if step.is_rehearsal() or self._inquiry is None:
            return False
        if self._finding is None:
            self._state.loader.draw_audits(self._inquiry.round)
            return True
        finding, number = self._finding, self._state.step
        self.decided()
        here = world.current()
        rank, listed = here.placement.rank, " and ".join(map(str, finding.witnesses))
        if not finding.culprits:
            raise WrongResult(
                f"strict mode: ranks {listed} have different results of shard {finding.shard} in step {number}, also "
                f"when they computed it again, so that it cannot be told which one is wrong. The step is not applied. "
                f"If it is not a processor or memory, the loop body gives other gradients when it runs again; with "
                f"three workers or more a wrong one is found"
            )
        first = min(each for each in range(here.placement.size) if each not in finding.culprits)
        if self._job is not None and rank in (first, *finding.culprits):
            self._job.link.send(
                ShardDiffered(here.id.number, number, finding.shard, finding.culprits, finding.witnesses)
            )
        if rank in finding.culprits:
            raise WrongResult(
                f"strict mode: this worker, rank {rank}, has computed shard {finding.shard} of step {number} wrongly, "
                f"as the results of rank {listed} show. The step is not applied, and the others train on without this "
                f"worker. Test the processor and the memory of this machine before it is used again"
            )
        return False

    def decided(self) -> None:
        if self._inquiry is not None:
            self._inquiry = self._finding = None
            self._state.loader.draw_audits(0)

    def _what(self, inquiry: Inquiry, shards: Sequence[int]) -> str:
        pairs = " and ".join(
            f"{owner} and {auditor} have different results of shard {shards[owner]}" for owner, auditor in inquiry.pairs
        )
        then = (
            "it is computed again to find the wrong one"
            if self._job is not None
            else "the job ends: one of fixed size cannot compute it again"
        )
        return f"strict mode: ranks {pairs} in step {self._state.step}; {then}"
