"""The place of a job's checkpoints, from the side of the launcher: taken for as long as the job runs, and kept up to
date. Used by cli.py and in_thread.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from farandole.checkpoint.beginning import begin
from farandole.checkpoint.job_lock import JobLock
from farandole.checkpoint.local_store import LocalStore
from farandole.env import CheckpointEnv, checkpoint_environment
from farandole.events import Event, GenerationStarted, StateLost
from farandole.membership import Origin

_CLOSE_S = 5.0


@dataclass(frozen=True)
class Beginning:
    """Where a job begins. Without checkpoints: anew, and nothing is written down.

    origin       where its numbers begin
    environment  what its workers have to know
    notes        what a person has to know
    watch        to be told of all events
    """

    origin: Origin | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    watch: Callable[[Event], None] = lambda event: None


@contextlib.contextmanager
def beginning(settings: CheckpointEnv | None) -> Iterator[Beginning]:
    """Take the place for as long as the job runs. Raises what begin() raises."""
    if settings is None:
        yield Beginning()
        return
    begun = begin(settings)
    counting = _Counting(begun.lock, begun.origin)
    try:
        yield Beginning(begun.origin, checkpoint_environment(begun.settings), begun.notes, counting.watch)
    finally:
        counting.close()
        begun.lock.close()


class _Counting:
    """Writes down each generation and each run id. A disk that is full must not end the job: the manifests count, too.

    In a folder, at once. For an object store, which may take seconds, in a thread of its own, the newest numbers only.
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
        """What is known is written down first, if that takes no longer than a store should."""
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
