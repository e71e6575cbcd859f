"""When a worker saves the state of the job, and when it begins from a saved one. The run loops call it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from farandole.checkpoint.folder import CheckpointFolder, read_manifest
from farandole.checkpoint.restore import restore
from farandole.checkpoint.schedule import Due, parse_every
from farandole.checkpoint.snapshot import Kept, Staging, live
from farandole.checkpoint.writer import Writer, Written
from farandole.clock import now_s
from farandole.collectives import world
from farandole.env import CheckpointEnv, read_checkpoint_env
from farandole.errors import ConfigError
from farandole.membership import Progress
from farandole.messages import CheckpointEnded
from farandole.worker.job import Job

_ANSWER_S = 30.0  # for the coordinator to say whether a checkpoint counts; it is busy for milliseconds at most

Rule = Literal["step", "commit"]


def checkpoints(job: Job | None, state: Kept, rule: Rule) -> Checkpoints | None:
    """None for a job that writes none."""
    settings = read_checkpoint_env()
    return Checkpoints(job, state, rule, settings) if job is not None and settings is not None else None


class Checkpoints:
    """The checkpoints of one elastic function. Rank 0 writes: after a sync every member holds the state.

    All ranks know when one is due; one that becomes rank 0 later writes its first one soon, since the rank 0 before
    it may have died while it wrote.
    """

    def __init__(self, job: Job, state: Kept, rule: Rule, settings: CheckpointEnv) -> None:
        self._job, self._state, self._rule, self._settings = job, state, rule, settings
        self._staging = Staging()
        self._due = Due(parse_every(settings.every), now_s(), 0)
        self._is_restored = not settings.resume
        folder = CheckpointFolder(Path(settings.folder))
        self._writer = Writer(folder, rule, settings.keep, self._ask, self._tell)

    def before_sync(self, rank: int, founding: bool) -> None:
        """Before a state is copied to others, or another one is taken over. At the start of the job the source,
        rank 0, begins where the checkpoint is. Raises ConfigError when that is not possible."""
        self._staging.copies.finish()
        if founding and rank == 0 and not self._is_restored:
            state = self._state
            path = Path(self._settings.folder) / self._settings.resume
            try:
                found = read_manifest(path)
            except OSError as error:
                raise ConfigError(f"the checkpoint {path} was there when the job started: {error}") from error
            if found.manifest.rule != self._rule:
                raise ConfigError(
                    f"the checkpoint {found.path} was written under the {found.manifest.rule} rule, and this script "
                    f"follows the {self._rule} rule: with a loader of Farandole a TorchState follows the step rule"
                )
            restore(state, found, world.current().id.lineage)
            state.capture()
            self._is_restored = True

    def entered(self) -> None:
        """This worker has the state of the job for the first time. Raises ConfigError for one that cannot be saved."""
        if world.current().placement.rank == 0:
            live(self._state, self._state.progress)
        self._due.restart(now_s(), self._state.progress.step)

    def at_boundary(self, is_captured: bool = True) -> None:
        """Begin a checkpoint if one is due. Else nothing: the small state need not be captured for that."""
        here = world.current()
        if here.placement.rank != 0:
            return
        progress = self._progress()
        if self._due.is_due(now_s(), progress.step) and not self._writer.is_busy():
            self._due.restart(now_s(), progress.step)
            if not is_captured:
                self._state.capture()
            self._writer.begin(
                lambda: self._staging.take(self._state, progress),
                self._staging.copies.finish,
                progress.step,
                here.id.number,
                here.placement.size,
            )

    def at_end(self) -> None:
        """All have finished: the last one, so that the same command has nothing to do any more."""
        self._writer.wait()
        if world.current().placement.rank == 0:
            self._state.capture()
            self._write_now()

    def is_keeper(self) -> bool:
        """Whether the job has ended, and this worker is to save what there is."""
        return self._job.link.is_keeper and self._state.is_holder

    def in_emergency(self, is_captured: bool) -> None:
        """The job ends before it is finished: save what there is, if this worker is the one to do so.

        is_captured  the captured small state belongs to the large state as it is; else what is live does
        """
        if self.is_keeper():
            self._writer.give_up()
            self._staging.copies.finish()
            if not is_captured:
                self._state.capture()
            self._write_now()

    def close(self) -> None:
        """Nothing is left running; what was begun and is not published is removed."""
        self._writer.give_up()

    def _write_now(self) -> None:
        here, progress = world.current(), self._progress()
        if self._writer.published != progress:
            self._writer.write(lambda: live(self._state, progress), progress.step, here.id.number, here.placement.size)

    def _progress(self) -> Progress:
        return msgspec.structs.replace(self._state.progress, lineage=world.current().id.lineage)

    def _ask(self, name: str, progress: Progress) -> str:
        return self._job.link.may_publish(name, progress, _ANSWER_S)

    def _tell(self, written: Written) -> None:
        self._job.link.send(CheckpointEnded(written.name, written.step, written.took_s, written.error))
