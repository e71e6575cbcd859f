"""The comparison of the workers' states, which are hashed at boundaries. The step loop repairs one that differs."""

from __future__ import annotations

import logging
from collections.abc import Collection

from farandole.base.wire.link_messages import StatesDiffered
from farandole.errors import StateDiverged
from farandole.training.collectives import world
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import Divergence, SyncReport
from farandole.training.worker.checkpoints import Checkpoints
from farandole.training.worker.sample_records import SampleRecords
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


class StateWatch:
    """The knowledge of this worker about the others' states.

    digest      the hash of the last boundary; 0 for none
    has_saved   it has begun a checkpoint at that boundary: all compare a sample of their states at the next one. If
                they differ there, they may have differed before: states that differ do not become equal
    """

    def __init__(
        self, job: WorkerJob | None, state: StepState, records: SampleRecords | None, checkpoints: Checkpoints | None
    ) -> None:
        self._job, self._state, self._records, self._checkpoints = job, state, records, checkpoints
        self.digest = 0
        self.has_saved = False
        self._is_asked = False  # some worker has begun a checkpoint
        self._is_sample = False  # the digest is one of a sample

    def hash_due(self, has_saved: bool) -> None:
        """Hash the parts that are due. `has_saved`: a checkpoint was begun here."""
        self.digest, self.has_saved, self._is_sample = 0, False, False
        if world.current().placement.size > 1:
            self.has_saved = has_saved
            self.digest = self._state.digests.of_due_block(self._state.step)
            if self._is_asked:
                self.digest, self._is_sample = self.digest ^ self.sample(), True
        self._is_asked = False

    def sample(self) -> int:
        """Hash a part that can be read in a few milliseconds; 0 for a worker alone."""
        if world.current().placement.size == 1:
            return 0
        return self._state.digests.of_sample(self._state.step, trained_only=False)

    def compare_headers(self, digests: Collection[int], is_asked: bool) -> None:
        """Compare the digests in the headers of all ranks. `is_asked`: some rank has begun a checkpoint."""
        self._is_asked = is_asked
        self.compare(digests, self._is_sample)

    def compare(self, digests: Collection[int], is_sample: bool) -> None:
        """Detect whether states differ, and whether a checkpoint that was begun may count."""
        if len(set(digests)) > 1:
            self._state.digests.is_suspicious = True
            self._judge_checkpoint(is_equal=False)
        elif is_sample:
            self._judge_checkpoint(is_equal=True)

    def synchronized(self, report: SyncReport) -> None:
        """Note that all have the same state. Raises StateDiverged when they had differed, if that ends the job."""
        self.digest, self._is_asked, self._is_sample = 0, False, False
        self._judge_checkpoint(is_equal=report.divergence is None)
        if report.local:
            if self._records is not None:
                self._records.found_local(self._state.step, report.local)
            logger.warning(
                "%s differs between workers after every step, also after it was made equal: it is computed from each "
                "worker's own samples. It is treated like the statistics of BatchNorm, and no longer compared",
                ", ".join(report.local),
            )
        if report.divergence is not None:
            self._report(report.divergence)

    def _judge_checkpoint(self, is_equal: bool) -> None:
        if self._checkpoints is not None:
            self._checkpoints.compared(is_equal)

    def _report(self, found: Divergence) -> None:
        fails = self._state.on_divergence == "fail"
        here = world.current()
        if self._records is not None:
            self._records.differed(found)
        if self._job is None:
            logger.warning("%s%s", found, "" if fails else "; they copied its state")
        elif here.placement.rank == 0:
            fields = (found.step, found.name, found.objects, found.ranks, found.source)
            self._job.link.send(StatesDiffered(here.id.number, *fields, fails))
        if fails:
            raise StateDiverged(
                f'{found}; the job ends, as TorchState(on_divergence="fail") requires. Check whether the script '
                f"changes {found.name} on some workers only, or from values of their own samples"
            )
