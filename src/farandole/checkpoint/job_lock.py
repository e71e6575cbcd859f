"""One job at a time uses a folder of checkpoints, and each one knows what the one before has counted. Without torch.

The lock is the kernel's and goes with the process that holds it, `farandole run`, also when that is killed. What is
written down beside it is the fence: a job begins above every lineage and every generation that the folder has seen,
so that records and checkpoints of two jobs can always be told apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.errors import ConfigError

_JOB = "job.json"
_LOCK = "job.lock"


class Counted(msgspec.Struct, frozen=True):
    """The highest numbers that were ever used with this folder; 0 for none."""

    lineage: int = 0
    generation: int = 0


@dataclass
class JobLock:
    """The right to use a folder, and the numbers that this job has used."""

    folder: Path
    counted: Counted
    _handle: int

    def count(self, lineage: int, generation: int) -> None:
        """Write down what is used from now on. Not forced onto the disk: that would hold up a regroup, and what a
        power failure takes here the manifests still have, up to the last one. Raises OSError."""
        self.counted = Counted(max(lineage, self.counted.lineage), max(generation, self.counted.generation))
        unfinished = self.folder / f"{_JOB}.new"
        unfinished.write_bytes(msgspec.json.encode(self.counted))
        unfinished.rename(self.folder / _JOB)

    def close(self) -> None:
        """Let another job use the folder."""
        with contextlib.suppress(OSError):
            os.close(self._handle)


def lock(folder: Path) -> JobLock:
    """Make the folder if need be, and take it. Raises ConfigError, saying what to do, when another job has it and
    when it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Close-on-exec, or workers would inherit the lock and hold it after this process.
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = JobLock(folder, _read(folder), handle)
        taken.count(0, 0)  # finds out now whether files can be written here
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"--checkpoint {folder}: another job is using this folder; wait for its end, or give another one"
        ) from None
    except OSError as error:
        os.close(handle)
        raise _unusable(folder, error) from error
    except BaseException:
        os.close(handle)
        raise
    return taken


def _read(folder: Path) -> Counted:
    try:
        return msgspec.json.decode((folder / _JOB).read_bytes(), type=Counted)
    except (FileNotFoundError, ValueError):  # the first job here, or a power failure
        return Counted()


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--checkpoint {folder}: no checkpoints can be written there ({error.strerror}); give a folder that this "
        f"user may write to, on a disk with room"
    )
