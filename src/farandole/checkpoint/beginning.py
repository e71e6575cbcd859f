"""The beginning of a job, from the contents of its place for checkpoints: lock, read, count. Without torch.

The launcher runs it for the jobs that it starts. Without Farandole's launcher, rank 0 runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from farandole.checkpoint.folder import CheckpointFolder
from farandole.checkpoint.job_lock import JobLock, lock
from farandole.checkpoint.store import open_store
from farandole.env import CheckpointEnv
from farandole.errors import ConfigError
from farandole.membership import Origin


@dataclass(frozen=True)
class Begun:
    """A place that this job has locked.

    origin    the beginning of its numbers
    settings  settings for its workers
    notes     notes for people
    lock      to be closed at the job's end
    """

    origin: Origin
    settings: CheckpointEnv
    notes: tuple[str, ...]
    lock: JobLock


def begin(settings: CheckpointEnv) -> Begun:
    """Lock a place and read it. Raises ConfigError when another job uses the place, when it cannot be reached or
    written to, and when it contains only damaged checkpoints."""
    taken = lock(open_store(settings.folder))
    try:
        return _begin(settings, taken)
    except OSError as error:
        taken.close()
        raise ConfigError(f"--checkpoint {settings.folder}: {error}") from error
    except BaseException:
        taken.close()
        raise


def _begin(settings: CheckpointEnv, taken: JobLock) -> Begun:
    folder = CheckpointFolder(taken.store)
    folder.remove_unpublished()
    found, damaged = folder.complete()
    notes = [f"a checkpoint was passed over: {each.why}" for each in damaged]
    if damaged and not found:
        raise ConfigError(
            f"--checkpoint {settings.folder}: no checkpoint there can be read ({damaged[0].why}); to start at "
            f"the beginning, give an empty folder"
        )
    run_id, generation = taken.counted.run_id, taken.counted.generation
    if found:
        newest = found[0].manifest
        run_id, generation = max(run_id, newest.run_id), max(generation, newest.generation)
        notes.append(f"resuming from {found[0].place}: epoch {newest.epoch}, step {newest.step}")
    origin = Origin(run_id + 1, generation, has_checkpoint=bool(found))
    taken.count(origin.run_id, generation)
    settings = replace(settings, resume=found[0].name if found else "", run_id=origin.run_id, owner=taken.owner)
    return Begun(origin, settings, tuple(notes), taken)
