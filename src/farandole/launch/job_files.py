"""One small file for each job of this user that runs here, so that commands find it. local.py writes it,
control_commands.py reads it.

The files hold the jobs' tokens: they are the user's alone, in a folder that is the user's alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from farandole.clock import wall_time_s
from farandole.env import read_runtime_folder
from farandole.errors import ConfigError
from farandole.membership import Address

_SUFFIX = ".job"


class JobFile(msgspec.Struct, frozen=True):
    """What a command has to know of a running job.

    pid, born    its launcher's process; `born`, in the kernel's ticks since the machine started, tells it from a later
                 process of the same number. None where the kernel does not say
    started_s    seconds since 1970
    """

    job: str
    pid: int
    born: int | None
    coordinator: Address
    token: bytes
    command: tuple[str, ...]
    started_s: float


@contextlib.contextmanager
def announced(
    job: str, coordinator: Address, token: bytes, command: Sequence[str], folder: Path | None = None
) -> Iterator[str]:
    """Inside, this process's job can be found by commands. Gives why it cannot, if so: that is no reason for a job not
    to run. Files of launchers that were killed are removed on the way."""
    file = JobFile(job, os.getpid(), born(os.getpid()), coordinator, token, tuple(command), wall_time_s())
    path: Path | None = None
    problem = ""
    try:
        folder = _private_folder(read_runtime_folder() if folder is None else folder)
        running(folder)
        path = folder / f"{job}{_SUFFIX}"
        _write(path, msgspec.json.encode(file))
    except (OSError, ConfigError) as error:
        problem = str(error)
    try:
        yield problem
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def running(folder: Path | None = None) -> list[JobFile]:
    """The jobs of this user that run here, the oldest first. Removes the files of those whose launcher is gone. Raises
    ConfigError when the folder is not the user's alone."""
    folder = read_runtime_folder() if folder is None else folder
    if not folder.exists():
        return []
    found = []
    for path in sorted(_private_folder(folder).glob(f"*{_SUFFIX}")):
        try:
            file = msgspec.json.decode(path.read_bytes(), type=JobFile)
        except (OSError, msgspec.MsgspecError):
            continue  # gone meanwhile, or of another version: not ours to remove
        if is_alive(file):
            found.append(file)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda file: file.started_s)


def is_alive(file: JobFile) -> bool:
    """Whether the job's launcher still runs: the same process, not a later one of the same number."""
    try:
        os.kill(file.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's: the number was used again
    return file.born is None or born(file.pid) == file.born


def born(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None where there is no /proc, or no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _private_folder(folder: Path) -> Path:
    """The folder, made if need be. Raises ConfigError when others could read or change what is in it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of this user's alone (it has owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}; it needs owner {os.geteuid()}, mode drwx------): remove it, or set "
            "XDG_RUNTIME_DIR to a folder that is"
        )
    return folder


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, and never readable by others."""
    beside = path.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    beside.rename(path)
