"""The place of a job's checkpoints, from the side of the launcher: locked for as long as the job runs, and kept up to
date. Used by launcher.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from farandole.base.checkpoints.folder import CheckpointFolder, JobLock, begin_job, continue_job
from farandole.base.checkpoints.store import LocalStore
from farandole.base.env import CheckpointEnv, environment_of
from farandole.base.events.event import Event
from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.job_events import StateLost
from farandole.base.membership import Origin
from farandole.errors import ConfigError
from farandole.job.launch.job_state import JobState
from farandole.job.launch.output import BackgroundWriter

_CLOSE_S = 5.0


@dataclass(frozen=True)
class Beginning:
    """The beginning of a job. Without checkpoints it begins anew, and nothing is recorded.

    origin       the beginning of its numbers
    environment  additional variables of its workers
    notes        notes for the user
    watch        called with all events
    """

    origin: Origin | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    watch: Callable[[Event], None] = lambda event: None


@contextlib.contextmanager
def beginning(settings: CheckpointEnv | None, state: JobState | None = None) -> Iterator[Beginning]:
    """Lock the place for as long as the job runs, and begin the job's `state`, or take it over. Raises the errors of
    begin_job(), and ConfigError for a state with other settings."""
    with contextlib.ExitStack() as stack:
        origin: Origin | None = None
        notes: tuple[str, ...] = ()
        watch = Beginning.watch
        if state is not None and state.is_continued:
            notes = (f"continuing job {state.job_id}, whose launcher has died",)
            settings = _former_settings(settings, state)
            if settings is not None:
                lock = stack.enter_context(contextlib.closing(continue_job(settings)))
                numbers = Origin(lock.counted.run_id, lock.counted.generation, has_checkpoint=False)
                watch = stack.enter_context(contextlib.closing(_NumberRecorder(lock, numbers))).watch
                if state.lost:  # the coordinator does not know them any more
                    found, _ = CheckpointFolder(lock.store).complete()
                    origin = replace(numbers, has_checkpoint=bool(found))
        elif settings is not None:
            begun = begin_job(settings)
            lock = stack.enter_context(contextlib.closing(begun.lock))
            settings, origin, notes = begun.settings, begun.origin, begun.notes
            watch = stack.enter_context(contextlib.closing(_NumberRecorder(lock, origin))).watch
        if state is not None:
            state.begin(settings)
        yield Beginning(origin, {} if settings is None else environment_of(settings), notes, watch)


def _former_settings(settings: CheckpointEnv | None, state: JobState) -> CheckpointEnv | None:
    """Return the settings that the workers of a continued job have. Raises ConfigError where other ones are given."""
    former = state.checkpoint
    if former is not settings and (former is None or settings is None or former.folder != settings.folder):
        given = "without --checkpoint" if settings is None else f"with --checkpoint {settings.folder}"
        begun = "without it" if former is None else f"with --checkpoint {former.folder}"
        raise ConfigError(f"the job of --state was begun {begun}, not {given}; give the same options")
    return former


class _NumberRecorder:
    """Records each generation and each run id. A full disk must not end the job: the manifests count, too. In a folder
    it writes at once. For an object store, which may take seconds, it writes in a thread, the newest numbers only."""

    def __init__(self, lock: JobLock, origin: Origin) -> None:
        self._lock = lock
        self._run_id, self._generation = origin.run_id, origin.generation
        self._writer: BackgroundWriter[None] | None = None
        if not isinstance(lock.store, LocalStore):
            self._writer = BackgroundWriter("farandole-counting", self._write, lambda dropped_bytes: None)

    def watch(self, event: Event) -> None:
        if isinstance(event, StateLost):
            self._run_id = event.run_id
        elif isinstance(event, GenerationStarted):
            self._generation = event.number
        else:
            return
        if self._writer is None:
            self._write()
        else:
            self._writer.put(None, b"")

    def close(self) -> None:
        """Write the pending numbers, if that takes no longer than the time limit of a store, and stop."""
        if self._writer is not None:
            self._writer.close(_CLOSE_S)

    def _write(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._lock.count(self._run_id, self._generation)
