"""The folder of a job's checkpoints, from the side of the launcher: taken, looked into, kept up to date. Used by
cli.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from farandole.checkpoint.folder import CheckpointFolder
from farandole.checkpoint.job_lock import JobLock, lock
from farandole.env import CheckpointEnv, checkpoint_environment
from farandole.errors import ConfigError
from farandole.events import Event, GenerationStarted
from farandole.membership import Origin


@dataclass(frozen=True)
class Beginning:
    """Where a job begins. Without checkpoints: anew, and nothing is written down.

    origin       where its numbers begin
    environment  what its workers have to know
    notes        what a person has to know
    """

    origin: Origin | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    watch: Callable[[Event], None] = lambda event: None


@contextlib.contextmanager
def beginning(settings: CheckpointEnv | None) -> Iterator[Beginning]:
    """Take the folder for as long as the job runs. Raises ConfigError when another job has it, when it cannot be
    written to, and when there is no checkpoint in it but damaged ones."""
    if settings is None:
        yield Beginning()
        return
    taken = lock(Path(settings.folder))
    try:
        yield _begin(settings, taken)
    finally:
        taken.close()


def _begin(settings: CheckpointEnv, taken: JobLock) -> Beginning:
    folder = CheckpointFolder(Path(settings.folder))
    try:
        folder.remove_unpublished()
        found, damaged = folder.complete()
        notes = [f"a checkpoint was passed over: {each.why}" for each in damaged]
        if damaged and not found:
            raise ConfigError(
                f"--checkpoint {settings.folder}: no checkpoint there can be read ({damaged[0].why}); to start at "
                f"the beginning, give an empty folder"
            )
        lineage, generation = taken.counted.lineage, taken.counted.generation
        if found:
            newest = found[0].manifest
            lineage, generation = max(lineage, newest.lineage), max(generation, newest.generation)
            settings = replace(settings, resume=found[0].path.name)
            notes.append(f"resuming from {found[0].path}: epoch {newest.epoch}, step {newest.step}")
        origin = Origin(lineage + 1, generation)
        taken.count(origin.lineage, generation)
    except OSError as error:
        raise ConfigError(f"--checkpoint {settings.folder}: {error}") from error

    def watch(event: Event) -> None:
        """Count each generation. A disk that is full must not end the job: the manifests count, too."""
        if isinstance(event, GenerationStarted):
            with contextlib.suppress(OSError):
                taken.count(origin.lineage, event.number)

    return Beginning(origin, checkpoint_environment(settings), tuple(notes), watch)
