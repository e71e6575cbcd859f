"""Checkpoints of a worker: when it saves the state of the job, and when it begins from a saved one."""

from __future__ import annotations

import logging
import threading
from typing import Literal

import msgspec

from farandole.base.checkpoints.folder import CheckpointFolder, Found, LockedStore, begin_job, has_lost_it
from farandole.base.checkpoints.schedule import Due, parse_every
from farandole.base.checkpoints.store import open_store
from farandole.base.env import CheckpointEnv, read_checkpoint_env
from farandole.base.machine import now_s
from farandole.base.membership import Progress
from farandole.base.wire.link_messages import CheckpointEnded
from farandole.errors import ConfigError
from farandole.training.checkpoint.checkpoint_writer import CheckpointWriter, Written
from farandole.training.checkpoint.restore import read_newest, restore
from farandole.training.checkpoint.snapshot import Staging, digest_of_snapshot, live
from farandole.training.collectives import world
from farandole.training.state.step_state import StepState
from farandole.training.state.sync import Kept
from farandole.training.state.tracker import flush_trackers
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")

Rule = Literal["step", "commit"]


_TAKEN = "another job now uses this place for its checkpoints"


def checkpoints(job: WorkerJob | None, state: Kept, rule: Rule) -> Checkpoints | None:
    """Return None for a job that writes no checkpoints. Raises ConfigError where none can be written."""
    settings = read_checkpoint_env()
    return None if settings is None else Checkpoints(job, settings, state, rule)


class Checkpoints:
    """The checkpoints of one elastic function. Rank 0 writes: after a sync every member holds the state.

    All ranks know when one is due. A worker that becomes rank 0 later writes its first one soon, since the previous
    rank 0 may have died during a write.

    A job's coordinator, which knows the members, decides whether a checkpoint counts. Without one (torchrun, mpirun,
    srun, or alone) rank 0 is the same process until the job ends: it locks the folder itself, and releases it when the
    elastic function has returned or the process ends. Only the folder knows whether a later job has taken it.
    """

    def __init__(self, job: WorkerJob | None, settings: CheckpointEnv, state: Kept, rule: Rule) -> None:
        self._job, self._state, self._rule = job, state, rule
        is_own_authority = job is None and world.current().placement.rank == 0
        self._begun: LockedStore | None = begin_job(settings) if is_own_authority else None
        for note in self._begun.notes if self._begun is not None else ():
            logger.warning("%s", note)
        self._settings = settings if self._begun is None else self._begun.settings
        self._staging = Staging()
        self._due = Due(parse_every(self._settings.every), now_s(), 0)
        self._restored = 0  # the run id that this worker has begun from a checkpoint
        self._folder = CheckpointFolder(open_store(self._settings.folder))
        self._writer = CheckpointWriter(self._folder, rule, self._settings.keep, self._ask, self._report)
        self._is_judged = threading.Event()  # whether all workers had the state that is being written is known
        self._is_judged.set()
        self._refusal = ""
        self._is_owed = False  # the last one was refused

    def _run_id(self) -> int:
        """Return the run id of the state that this worker has, or is about to get."""
        return self._settings.run_id if self._job is None else world.current().id.run_id

    def before_sync(self, rank: int, bootstrap: bool) -> None:
        """Prepare for a sync, before a state is copied to others or another one is taken over. At the start of the job,
        and when all holders of its state are lost, the source, rank 0, begins from the newest checkpoint. Raises
        ConfigError when that is not possible."""
        self._staging.copies.finish()
        run_id = self._run_id()
        if bootstrap and rank == 0 and run_id != self._restored:
            if self._settings.resume or run_id > self._settings.run_id:
                self._restore(run_id)
            self._restored = run_id

    def _restore(self, run_id: int) -> None:
        try:
            found, value = read_newest(self._folder, logger.warning)
        except OSError as error:
            raise ConfigError(f"the checkpoints in {self._folder.store.place} cannot be read: {error}") from error
        if found.manifest.rule != self._rule:
            raise ConfigError(
                f"the checkpoint {found.place} was written under the {found.manifest.rule} rule, and this script "
                f"follows the {self._rule} rule: with a loader of Farandole a TorchState follows the step rule"
            )
        restore(self._state, found, value, run_id)
        self._state.capture()
        if isinstance(self._state, StepState) and self._state.is_strict:
            self._compare(found)
        logger.info("training starts from %s: step %d", found.place, found.manifest.step)

    def _compare(self, found: Found) -> None:
        """Warn if the state has not the bits that were saved."""
        saved, loaded = found.manifest.digest, digest_of_snapshot(live(self._state, self._state.progress))
        if saved and saved != loaded:
            logger.warning(
                "strict mode: the state that was loaded from %s has the digest %s, and %s was saved: the model will "
                "not be the one that the other job would have trained. Check whether load_state_dict() of an object in "
                "the state changes its values",
                found.place,
                loaded,
                saved,
            )

    def entered(self) -> None:
        """Note that this worker has the state of the job for the first time. Raises ConfigError for a state that cannot
        be saved."""
        if world.current().placement.rank == 0:
            live(self._state, self._state.progress)
        self._due.restart(now_s(), self._state.progress.step)

    def begin_if_due(self, is_captured: bool = True) -> bool:
        """Begin a checkpoint if one is due, and return whether one was; otherwise the metadata need not be captured.
        Under the step rule with several workers, it is published after compared()."""
        here = world.current()
        if here.placement.rank != 0:
            return False
        progress = self._progress()
        is_due = self._is_owed or self._due.is_due(now_s(), progress.step)
        if is_due and not self._writer.is_busy():
            self._due.restart(now_s(), progress.step)
            if not is_captured:
                self._state.capture()
            flush_trackers(self._state)  # the metadata have the newest records only
            self._is_owed = False
            if self._rule == "step" and here.placement.size > 1:
                self._is_judged.clear()
            self._writer.begin(
                lambda: self._staging.take(self._state, progress),
                self._staging.copies.finish,
                progress.step,
                here.id.number,
                here.placement.size,
            )
            return True
        return False

    def compared(self, is_equal: bool) -> None:
        """Judge the checkpoint after all workers have compared their states, a step after it was begun or later: states
        that differ do not become the same by themselves."""
        if not self._is_judged.is_set():
            self._is_owed = not is_equal
            differ = "the states of the workers differ; the next checkpoint is written when they are equal"
            self._judge("" if is_equal else differ)

    def _judge(self, refusal: str) -> None:
        if not self._is_judged.is_set():
            self._refusal = refusal
            self._is_judged.set()

    def _ask(self, name: str, progress: Progress) -> str:
        """Return "" if a checkpoint may be published, else the reason. Runs in the writer's thread. Raises OSError."""
        self._is_judged.wait()
        refusal, self._refusal = self._refusal, ""
        if refusal:
            return refusal
        if has_lost_it(self._folder.store, self._settings.owner):
            return _TAKEN
        return self._job.may_publish(name, progress) if self._job is not None else ""

    def _report(self, written: Written) -> None:
        if self._job is not None:
            self._job.link.send(CheckpointEnded(written.name, written.step, written.took_s, written.error))
        elif written.error:
            logger.warning(
                "step %d could not be saved: %s; earlier checkpoints are untouched", written.step, written.error
            )
        else:
            logger.info("saved step %d as %s in %.1f s", written.step, written.name, written.took_s)

    def at_end(self) -> None:
        """Write the last checkpoint after all workers have finished: the same command then has nothing left to do."""
        self._judge("")  # no further comparison follows
        self._writer.wait()
        if world.current().placement.rank == 0:
            self._state.capture()
            self._write_now()

    def is_emergency_writer(self) -> bool:
        """Return whether the job has ended and this worker has to save the state."""
        return self._job is not None and self._job.link.is_emergency_writer and self._state.is_holder

    def in_emergency(self) -> None:
        """Save the live state of a job that ends unfinished, if this worker is the emergency writer."""
        if self.is_emergency_writer() and not world.is_forked_child():
            self._give_up()
            self._staging.copies.finish()
            self._state.capture()
            self._write_now()

    def close(self) -> None:
        """Stop the writer. A checkpoint that was begun and is not published is removed. In a forked child nothing
        happens: the writer is its parent's."""
        if world.is_forked_child():
            return
        self._give_up()
        if self._begun is not None:
            self._begun.lock.close()

    def _give_up(self) -> None:
        self._judge("the job has ended")
        self._writer.give_up()
        self._refusal = ""

    def _write_now(self) -> None:
        here, progress = world.current(), self._progress()
        if self._writer.published != progress:
            flush_trackers(self._state)
            self._writer.write(lambda: live(self._state, progress), progress.step, here.id.number, here.placement.size)

    def _progress(self) -> Progress:
        return msgspec.structs.replace(self._state.progress, run_id=self._run_id())
