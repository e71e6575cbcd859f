"""The authority that decides whether a checkpoint counts, and learns of it: a job's coordinator, or only the folder
itself. worker/checkpoints.py asks."""

from __future__ import annotations

import logging
from typing import Protocol

from farandole.checkpoint.beginning import Begun, begin
from farandole.checkpoint.checkpoint_writer import Written
from farandole.checkpoint.job_lock import has_lost_it
from farandole.checkpoint.store import open_store
from farandole.collectives import world
from farandole.env import CheckpointEnv
from farandole.membership import Progress
from farandole.messages import CheckpointEnded
from farandole.worker.worker_job import Job

logger = logging.getLogger("farandole")


class CheckpointAuthority(Protocol):
    """The authority over a job's checkpoints. `settings`: as far as the workers have to know them."""

    settings: CheckpointEnv

    def run_id(self) -> int:
        """Return the run id of the state that this worker has, or is about to get."""
        ...

    def ask(self, name: str, progress: Progress) -> str:
        """Ask whether a checkpoint may be published. Return "", or the reason for a refusal. Raises OSError."""
        ...

    def tell(self, written: Written) -> None:
        """Report the result of a checkpoint."""
        ...

    def is_emergency_writer(self) -> bool:
        """Return whether the job has ended and this worker has to save the state."""
        ...

    def close(self) -> None: ...


class CoordinatorAuthority:
    """The coordinator of `farandole run`, which knows the members. Only the folder knows whether a later job has taken
    it."""

    def __init__(self, job: Job, settings: CheckpointEnv) -> None:
        self.settings = settings
        self._job = job
        self._store = open_store(settings.folder)

    def run_id(self) -> int:
        return world.current().id.run_id

    def ask(self, name: str, progress: Progress) -> str:
        if has_lost_it(self._store, self.settings.owner):
            return TAKEN
        return self._job.may_publish(name, progress)

    def tell(self, written: Written) -> None:
        self._job.link.send(CheckpointEnded(written.name, written.step, written.took_s, written.error))

    def is_emergency_writer(self) -> bool:
        return self._job.link.is_emergency_writer

    def close(self) -> None:
        """Do nothing: no resources are held."""


class LocalAuthority:
    """The folder alone. Without a coordinator (torchrun, mpirun, srun, or alone) rank 0 is the same process until the
    job ends. It locks the folder itself, and releases it when the elastic function has returned or the process ends."""

    def __init__(self, settings: CheckpointEnv, rank: int) -> None:
        self._begun: Begun | None = begin(settings) if rank == 0 else None
        self.settings = settings if self._begun is None else self._begun.settings
        for note in self._begun.notes if self._begun is not None else ():
            logger.warning("%s", note)

    def run_id(self) -> int:
        return self.settings.run_id

    def ask(self, name: str, progress: Progress) -> str:
        assert self._begun is not None, "only rank 0 writes"
        return TAKEN if has_lost_it(self._begun.lock.store, self.settings.owner) else ""

    def tell(self, written: Written) -> None:
        if written.error:
            logger.warning(
                "step %d could not be saved: %s; earlier checkpoints are untouched", written.step, written.error
            )
        else:
            logger.info("saved step %d as %s in %.1f s", written.step, written.name, written.took_s)

    def is_emergency_writer(self) -> bool:
        return False  # without a coordinator there is no order to do so

    def close(self) -> None:
        if self._begun is not None:
            self._begun.lock.close()


TAKEN = "another job has taken this place for its checkpoints since"
