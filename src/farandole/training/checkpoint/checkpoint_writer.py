"""The writer of snapshots into a folder, in a separate thread while training continues. worker/checkpoints.py calls
it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from farandole.base.checkpoints.folder import CheckpointFolder
from farandole.base.checkpoints.manifest import FORMAT, Manifest
from farandole.base.machine import now_s, wall_time_s
from farandole.base.membership import Progress
from farandole.errors import ConfigError, FarandoleError
from farandole.training.checkpoint.file_format import write_files
from farandole.training.checkpoint.snapshot import Snapshot, digest_of_snapshot

AskToPublish = Callable[[str, Progress], str]
"""Signature ask(name, progress): returns "" if the checkpoint may be published, else the reason."""


@dataclass(frozen=True)
class Written:
    """The result of a write. `error` is empty when the checkpoint is published."""

    name: str
    step: int
    took_s: float
    error: str = ""


class CheckpointWriter:
    """Writes checkpoints, one at a time.

    ask   decides whether a checkpoint counts
    tell  called at the end of each write, in the thread that wrote it
    keep  number of checkpoints to keep in the folder
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        rule: Literal["step", "commit"],
        keep: int,
        ask: AskToPublish,
        report: Callable[[Written], None],
    ) -> None:
        self._folder, self._rule, self._keep, self._ask, self._report = folder, rule, keep, ask, report
        self._thread: threading.Thread | None = None
        self._is_given_up = False
        self.published: Progress | None = None
        """Progress of the last checkpoint that this worker has published."""

    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self, take: Callable[[], Snapshot], finish_copy: Callable[[], None], step: int, generation: int, workers: int
    ) -> None:
        """Take a snapshot here, and start to write it; the writing thread calls `finish_copy` first. Not while
        is_busy()."""
        begun_s = now_s()
        try:
            snapshot = take()
        except _CANNOT_BE_TAKEN as failure:
            self._report(Written("", step, now_s() - begun_s, str(failure)))
            return

        def copied() -> Snapshot:
            finish_copy()
            return snapshot

        # Not a daemon, for the reason given in farandole/training/state/deep_copy.py. give_up() ends it in time.
        self._thread = threading.Thread(
            target=self.write, args=(copied, step, generation, workers), name="farandole-checkpoint"
        )
        self._thread.start()

    def write(self, take: Callable[[], Snapshot], step: int, generation: int, workers: int) -> None:
        """Take a snapshot and write it synchronously."""
        begun_s = now_s()
        name = error = ""
        try:
            name = self._write_one(take(), generation, workers)
        except _GivenUp:
            return
        except OSError as failure:
            error = f"{failure.strerror or failure} ({self._folder.store.place})"
        except Exception as failure:  # noqa: BLE001 - any error is reported, and training continues
            error = str(failure) if isinstance(failure, FarandoleError) else f"{type(failure).__name__}: {failure}"
        self._report(Written(name, step, now_s() - begun_s, error))

    def wait(self) -> None:
        """Wait until the current write has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def give_up(self) -> None:
        """End the current write soon, and leave nothing of it behind, unless it is being published."""
        self._is_given_up = True
        self.wait()
        self._is_given_up = False

    def _write_one(self, snapshot: Snapshot, generation: int, workers: int) -> str:
        name = self._folder.begin(snapshot.progress.step)
        try:
            files = write_files(self._folder.store, name, snapshot.plain, snapshot.tensors, self._check)
            if refusal := self._ask(name, snapshot.progress):
                self._check()
                raise FarandoleError(f"it was not published: {refusal}")
            manifest = Manifest(
                format=FORMAT,
                rule=self._rule,
                **msgspec.structs.asdict(snapshot.progress),
                generation=generation,
                workers=workers,
                written_s=wall_time_s(),
                files=files,
                digest=digest_of_snapshot(snapshot),
            )
            self._folder.publish(name, manifest)
        except BaseException:
            self._folder.discard(name)
            raise
        self.published = snapshot.progress
        self._folder.retain(self._keep)
        return name

    def _check(self) -> None:
        if self._is_given_up:
            raise _GivenUp


# A value that no checkpoint can hold, or no memory for a copy: a RuntimeError of torch.
_CANNOT_BE_TAKEN = (ConfigError, RuntimeError, MemoryError)


class _GivenUp(Exception):
    """Raised in the writing thread after give_up() was called."""
