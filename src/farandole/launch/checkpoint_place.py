"""The place of a job's checkpoints, from the side of the launcher: locked for as long as the job runs, and kept up to
date; and the user's settings of checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farandole.checkpoint.folder import JobLock, begin_job
from farandole.checkpoint.schedule import parse_every
from farandole.checkpoint.store import LocalStore, normalized
from farandole.env import CheckpointEnv, environment_of
from farandole.errors import ConfigError
from farandole.events import Event, GenerationStarted, StateLost
from farandole.membership import Origin

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
def beginning(settings: CheckpointEnv | None) -> Iterator[Beginning]:
    """Lock the place for as long as the job runs. Raises the errors of begin_job()."""
    if settings is None:
        yield Beginning()
        return
    begun = begin_job(settings)
    counting = _NumberRecorder(begun.lock, begun.origin)
    try:
        yield Beginning(begun.origin, environment_of(begun.settings), begun.notes, counting.watch)
    finally:
        counting.close()
        begun.lock.close()


class _NumberRecorder:
    """Records each generation and each run id. A full disk must not end the job: the manifests count, too.

    In a folder it writes at once. For an object store, which may take seconds, it writes in a thread, the newest
    numbers only.
    """

    def __init__(self, lock: JobLock, origin: Origin) -> None:
        self._lock = lock
        self._run_id, self._generation = origin.run_id, origin.generation
        self._changed = threading.Condition()
        self._is_behind = self._is_closing = False
        self._thread: threading.Thread | None = None
        if not isinstance(lock.store, LocalStore):
            self._thread = threading.Thread(target=self._run, name="farandole-counting", daemon=True)
            self._thread.start()

    def watch(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, StateLost):
                self._run_id = event.run_id
            elif isinstance(event, GenerationStarted):
                self._generation = event.number
            else:
                return
            self._is_behind = True
            self._changed.notify()
        if self._thread is None:
            self._write()

    def close(self) -> None:
        """Write the pending numbers, if that takes no longer than the time limit of a store, and stop."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_behind or self._is_closing)
                if not self._is_behind:
                    return
                self._is_behind = False
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.count(self._run_id, self._generation)


# The user's settings of checkpoints, checked --------------------------------------------------------------------------


def checkpoint_settings(place: str | Path | None, every: str, keep: int) -> CheckpointEnv | None:
    """Return the user's settings, checked; None for no checkpoints. Raises ConfigError."""
    parse_every(every)
    if keep < 1:
        raise ConfigError(f"--checkpoint-keep must be at least 1, got {keep}")
    return None if place is None else CheckpointEnv(normalized(str(place)), every, keep)
