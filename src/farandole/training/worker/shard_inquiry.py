"""The worker's side of the audit of strict mode: when results of a shard differ, the step comes again until the rank is
known that was wrong, which then ends.

state/shard_audit.py, which is pure, draws the audits and judges. All ranks hear the same results, in the step header,
and so come to the same conclusion.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from farandole.base.wire.link_messages import ShardDiffered
from farandole.errors import ShardsDiffer, WrongResult
from farandole.training.collectives import world
from farandole.training.state.session import Auditor
from farandole.training.state.shard_audit import Finding, Inquiry

if TYPE_CHECKING:
    from farandole.training.state.batch import GlobalBatch
    from farandole.training.state.step_state import StepState
    from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


class ShardInquiry(Auditor):
    """The inquiries of one worker; see Auditor in state/session.py.

    Args:
        job: None in a job of fixed size, where no step can be repeated: results that differ end it.
        state: The state of a strict job.
        draw_round: Sets the round of the loader's audits (AuditRule).
    """

    def __init__(self, job: WorkerJob | None, state: StepState, draw_round: Callable[[int], None]) -> None:
        self._job, self._state, self._draw_round = job, state, draw_round
        self._inquiry: Inquiry | None = None
        self._finding: Finding | None = None
        self._place = 0  # of the reduction whose results differed, among those of the step: each optimizer has one
        self._global_batch: GlobalBatch | None = None
        self._reductions = 0  # of this global batch

    def compare(self, global_batch: GlobalBatch, own: Sequence[int], again: Sequence[int]) -> None:
        """Compare the results of a reduction, or take those of another round."""
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

    def goes_on(self) -> bool:
        """Return, after a step without effect, whether it was one of an inquiry that goes on: the same batch comes
        again on all ranks. False: there is none, or a rank has ended because of it, which the others lose.

        Raises:
            WrongResult: On the rank that was wrong; on all, where it is not known which one was.
        """
        if self._inquiry is None:
            return False
        if self._finding is None:
            self._draw_round(self._inquiry.round)
            return True
        finding, step = self._finding, self._state.step
        self.forget()
        rank, listed = world.current().placement.rank, " and ".join(map(str, finding.witnesses))
        if not finding.culprits:
            raise WrongResult(
                f"strict mode: ranks {listed} have different results of shard {finding.shard} in step {step}, also "
                f"when they computed it again, so that it cannot be told which one is wrong. The step is not applied. "
                f"If it is not a processor or memory, the loop body gives other gradients when it runs again; with "
                f"three workers or more a wrong one is found"
            )
        first = min(each for each in range(world.current().placement.size) if each not in finding.culprits)
        if self._job is not None and rank in (first, *finding.culprits):
            number = world.current().id.number
            self._job.link.send(ShardDiffered(number, step, finding.shard, finding.culprits, finding.witnesses))
        if rank in finding.culprits:
            raise WrongResult(
                f"strict mode: this worker, rank {rank}, has computed shard {finding.shard} of step {step} wrongly, as "
                f"the results of rank {listed} show. The step is not applied, and the others train on without this "
                f"worker. Test the processor and the memory of this machine before it is used again"
            )
        return False

    def forget(self) -> None:
        """End an inquiry: its step was made, or the workers are others."""
        if self._inquiry is not None:
            self._inquiry = self._finding = None
            self._draw_round(0)

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
