"""Files of a job beside its output: the job file, by which commands find a running job, and the file of its events.

There is one small job file for each running job of this user on this machine. It holds the job's token: only the user
can read it, in a folder that only the user can enter. With --job-file there is one more, on a file system that machines
share, by which agents and commands of other machines find the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from farandole.base.env import read_runtime_folder
from farandole.base.events.event import Event
from farandole.base.machine import now_s, wall_time_s
from farandole.base.membership import Address
from farandole.base.wire.user_secret import private_folder, replace_file
from farandole.errors import ConfigError
from farandole.job.launch.output import BackgroundWriter

_SUFFIX = ".job"
_LONGEST_BYTES = 1 << 20


class JobFile(msgspec.Struct, frozen=True):
    """The data that a command needs about a running job.

    pid, born    its launcher's process; `born`, in the kernel's ticks since the machine started, tells it from a later
                 process of the same number. None where the kernel does not report it
    started_s    seconds since 1970
    addresses    all addresses of the coordinator; empty in a file that is for this machine alone
    tls          the folder of the job's certificates on the launcher's machine; empty: connections are not encrypted
    processes    the namespace in which `pid` counts (man 7 pid_namespaces): containers may share the folder of these
                 files; empty where there is no such thing
    """

    job: str
    pid: int
    born: int | None
    coordinator: Address
    token: bytes
    command: tuple[str, ...]
    started_s: float
    addresses: tuple[Address, ...] = ()
    tls: str = ""
    processes: str = ""


@contextlib.contextmanager
def announced(file: JobFile, folder: Path | None = None) -> Iterator[str]:
    """Let commands of this machine find this process's job inside the block. Yields the reason if they cannot, which
    does not prevent the job from running. Removes the files of launchers that were killed."""
    path: Path | None = None
    problem = ""
    try:
        folder = private_folder(read_runtime_folder() if folder is None else folder)
        running(folder)
        path = folder / f"{file.job}{_SUFFIX}"
        replace_file(path, msgspec.json.encode(msgspec.structs.replace(file, addresses=())))
    except (OSError, ConfigError) as error:
        problem = str(error)
    try:
        yield problem
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def shared(path: Path | None, file: JobFile) -> Iterator[None]:
    """Let agents and commands of other machines find the job inside the block, by this file. A file of an earlier job
    is replaced. Raises ConfigError when it cannot be written."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(file))
    except OSError as error:
        raise ConfigError(f"the job file {path} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ConfigError):
            if read_job_file(path) == file:  # else another job, or another launcher of this one, has replaced it
                path.unlink()


def read_job_file(path: Path) -> JobFile:
    """Return the contents of a file of `farandole run --job-file`. Raises ConfigError when there is none, when others
    can read it, and when it is no such file."""
    try:
        with path.open("rb") as opened:
            mode, data = os.fstat(opened.fileno()).st_mode, opened.read(_LONGEST_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"the job file {path} does not exist: the job has not started yet, or has ended, or runs on a machine that "
            "does not share this folder"
        ) from None
    except OSError as error:
        raise ConfigError(f"the job file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"the job file {path} can be read by others (mode {stat.filemode(mode)}), and it holds the job's token: "
            f"end the job, and start it with another token; its folder must not change the modes of files"
        )
    try:
        return msgspec.json.decode(data, type=JobFile)
    except msgspec.MsgspecError:
        raise ConfigError(f"{path} is no job file of `farandole run --job-file`") from None


def running(folder: Path | None = None) -> list[JobFile]:
    """Return the jobs of this user that run here, the oldest first. Removes the files of jobs whose launcher is gone.
    Raises ConfigError when other users have access to the folder."""
    folder = read_runtime_folder() if folder is None else folder
    if not folder.exists():
        return []
    found = []
    for path in sorted(private_folder(folder).glob(f"*{_SUFFIX}")):
        try:
            file = msgspec.json.decode(path.read_bytes(), type=JobFile)
        except (OSError, msgspec.MsgspecError):
            continue  # gone meanwhile, or of another version: not to be removed here
        if file.processes != own_namespace():
            continue  # of another container, where its process has another number
        if is_alive(file):
            found.append(file)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda file: file.started_s)


def is_alive(file: JobFile) -> bool:
    """Return whether the job's launcher still runs: the same process, not a later one of the same number."""
    try:
        os.kill(file.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's: the number was used again
    return file.born is None or born(file.pid) == file.born


def born(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks; None where there is no /proc, or no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def own_namespace() -> str:
    """Return a name for the namespace of process numbers in which this process is; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


# The file of --events: all events of a job, one JSON object a line ----------------------------------------------------


class EventFile:
    """Appends lines to the file, each as soon as possible. A line that cannot be written is dropped: a full disk does
    not end the training. `on_trouble(sentence)` is called for the first such line; from any thread.

    Beside the event's own fields a line has `time`, seconds since 1970, `clock_s`, on the machine's monotonic clock,
    and `level`. Raises ConfigError when the file cannot be opened for writing.
    """

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self._path, self._on_trouble = path, on_trouble
        try:
            # Do not wait for a reader of a pipe: there may never be one.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                f"--events {path} cannot be written: {error.strerror}; give a file in an existing folder"
            ) from error
        os.set_blocking(self._descriptor, True)
        self._is_torn = self._has_failed = False
        self._writer: BackgroundWriter[str] = BackgroundWriter(
            "events", self._write, lambda dropped: self._complain(f"writing is too slow, {dropped} bytes are lost")
        )

    def on_event(self, event: Event) -> None:
        """Append the event. Never waits."""
        stamps = {"time": round(wall_time_s(), 6), "clock_s": round(now_s(), 6), "level": event.level}
        self._writer.put("", json.dumps({**stamps, **event.fields()}).encode() + b"\n")

    def close(self) -> None:
        """Write the remaining lines; waits for that with a time limit."""
        if self._writer.close():
            os.close(self._descriptor)

    def _write(self, _: str, data: bytes) -> None:
        rest = b"\n" + data if self._is_torn else data
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                self._is_torn = True  # a part of a line may have been written
        except OSError as error:
            self._complain(f"{error.strerror}")
        else:
            self._is_torn = False

    def _complain(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_trouble(f"--events {self._path}: {why}; events are missing from the file from now on")


# The folder of `--sample-ledger`, prepared before any worker starts ---------------------------------------------------


def ready_ledger_folder(folder: Path, may_hold_records: bool = False) -> Path:
    """Prepare the folder and return its absolute path. Raises ConfigError where it is not writable, and where it has
    records already, unless `may_hold_records` because this job continues their job."""
    try:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        holds_records = any(folder.glob("*.jsonl"))
    except OSError as error:
        raise ConfigError(f"--sample-ledger {folder} cannot be written to: {error.strerror}") from None
    if holds_records and not may_hold_records:
        raise ConfigError(
            f"--sample-ledger {folder} contains the ledger of an earlier job: give each job its own folder"
        )
    return folder
