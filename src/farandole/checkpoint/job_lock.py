"""The lock of a place for checkpoints, which one job at a time uses, and the numbers of the jobs before. Without torch.

In a folder, the lock is the kernel's and ends with the process that holds it, also when that is killed: a second job is
refused. An object store has no locks: there the later job owns the place, and the earlier one publishes nothing any
more (`has_lost_it`).

The numbers in job.json are the fence: a job begins above every run id and every generation that the place has seen, so
that records and checkpoints of two jobs can always be told apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.checkpoint.store import LocalStore, Store
from farandole.errors import ConfigError

_JOB = "job.json"
_LOCK = "job.lock"


class Counted(msgspec.Struct, frozen=True):
    """The highest numbers that were ever used with this place, 0 for none, and their last owner."""

    run_id: int = 0
    generation: int = 0
    owner: str = ""


@dataclass
class JobLock:
    """The right to use a place, and the numbers that this job has used."""

    store: Store
    counted: Counted
    owner: str
    _handle: int | None

    def count(self, run_id: int, generation: int) -> None:
        """Record the numbers that are used from now on. The file is not flushed to disk, which would delay a regroup;
        after a power failure the manifests still have the numbers, up to the last checkpoint. Raises OSError."""
        now = Counted(max(run_id, self.counted.run_id), max(generation, self.counted.generation), self.owner)
        if now != self.counted and not has_lost_it(self.store, self.owner, self.counted.owner):
            self.store.put(_JOB, msgspec.json.encode(now), forced=False)
        self.counted = now

    def close(self) -> None:
        """Allow another job to use the folder."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None


def lock(store: Store) -> JobLock:
    """Create the place if necessary, and lock it. Raises ConfigError, with advice, when another job has it and when it
    cannot be created or written to."""
    handle = None
    try:
        store.make()
        if isinstance(store, LocalStore):
            handle = _lock_file(store.path / _LOCK)
        taken = JobLock(store, _read(store), secrets.token_hex(8), handle)
        taken.count(0, 0)  # checks now whether files can be written here
    except BaseException as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, OSError):
            raise _unusable(store, error) from error
        raise
    return taken


def has_lost_it(store: Store, owner: str, before: str = "") -> bool:
    """Return whether a later job has taken the place. `before`: the owner when this job came. Raises OSError."""
    return _read(store).owner not in ("", before, owner)


def _lock_file(path: Path) -> int:
    # Close-on-exec, or workers would inherit the lock and hold it after this process.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"--checkpoint {path.parent}: another job is using this folder; wait until it has ended, or give another "
            f"folder"
        ) from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _read(store: Store) -> Counted:
    try:
        return msgspec.json.decode(store.read(_JOB), type=Counted)
    except (FileNotFoundError, ValueError):  # the first job here, or a power failure
        return Counted()


def _unusable(store: Store, error: OSError) -> ConfigError:
    return ConfigError(
        f"--checkpoint {store.place}: no checkpoints can be written there ({error.strerror or error}); give a place "
        f"with free space that this user may write to"
    )
