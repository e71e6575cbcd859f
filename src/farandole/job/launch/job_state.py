"""The state of a job that outlives its launcher (`farandole run --state DIR`): what the same command needs to continue
the job on this machine or another one, after the launcher was killed.

DIR/lock               locked by the launcher, which writes there who it is
DIR/job.json           the job, its token, and the number of its launcher
DIR/journal-N-0, -1    the files of the journal (coordinator/journal.py) of the launcher with number N, locked by it and
                       its coordinators
DIR/job                the job file, unless --job-file names another one

Each launcher has journal files of its own, to which it copies the newest state: a coordinator of an older launcher,
which may live on behind a broken network, cannot write there. Only the files' owner may read them: the token is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import select
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Protocol

import msgspec

from farandole.base.config import JobConfig
from farandole.base.env import CheckpointEnv
from farandole.base.events.event import Event
from farandole.base.events.host_events import StateUnwritten, StateWritten
from farandole.base.machine import now_s
from farandole.base.wire.authentication import new_token
from farandole.base.wire.user_secret import replace_file
from farandole.errors import ConfigError, FarandoleError
from farandole.job.coordinator.journal import (
    FORMAT,
    SOFTWARE,
    Journal,
    JournalDamaged,
    JournalError,
    JournalFiles,
    why_unreadable,
)

_LOCK, _JOB = "lock", "job.json"
_RELEASED_S = 2.0  # for a launcher that has just been killed, and its coordinator, to be gone
_AGAIN_S = 0.02
_COPY_AGAIN_S = 0.2


class StateUnavailable(FarandoleError):
    """The state cannot be written now."""


class JobState(Protocol):
    """The part of a state that a launcher needs: FolderState, or EtcdState (integrations/etcd/etcd_state.py).

    launcher      identifies this launcher among those of the job
    number        how many launchers the job has had, with this one, once it has begun
    is_continued  whether another launcher has begun the job
    lost          why the former launcher's journal cannot be used, though the job may run: its agents are to tell what
                  they know; empty: it can, or there is none
    checkpoint    the settings with which it began, where it writes checkpoints
    write_copy    writes a copy of the journal's newest state (`Journal.newest()`) to where the next launcher looks for
                  it; blocks for seconds at most; raises StateUnavailable, to be repeated. None: the journal's files are
                  there already
    """

    launcher: str
    job_id: str
    token: bytes
    number: int
    is_continued: bool
    lost: str
    journal_files: JournalFiles

    @property
    def write_copy(self) -> Callable[[bytes], None] | None: ...

    @property
    def checkpoint(self) -> CheckpointEnv | None: ...

    def begin(self, checkpoint: CheckpointEnv | None) -> None:
        """Take the job over, or begin it."""

    def successor(self) -> str:
        """Return who has taken the job over from this launcher; empty: nobody has."""

    def end(self, is_over: bool) -> None:
        """Forget the job, if it is over or has never begun. Idempotent."""


class Owner(msgspec.Struct, frozen=True):
    """Who has a job."""

    launcher: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _Version(msgspec.Struct, frozen=True):
    """The part of job.json that every version has. `format`: as in JournalIdentity."""

    version: str
    format: int = 1


class StoredJob(_Version, frozen=True, kw_only=True):
    """Content of job.json. `number` is that of the launcher whose journal counts. In etcd, `token` is derived from that
    of the job. With `is_continued` the job had begun before this launcher: in a folder, a journal without a state is a
    lost one then."""

    job_id: str
    token: bytes
    number: int
    command: tuple[str, ...]
    config: dict[str, object]
    checkpoint: CheckpointEnv | None = None
    is_continued: bool = False


class FolderState:
    """A state in a folder, locked from the beginning until `close()`.

    Args:
        folder: It is created when it is missing.
        command, config: Of the job; those of a job that is continued must be the same.
        token: Of the job; None: its own one, or a new one.

    Raises:
        ConfigError: Another launcher has locked it, or it is damaged, or of another job or version, or not private.
    """

    write_copy = None

    def __init__(self, folder: Path, command: Sequence[str], config: JobConfig, token: bytes | None) -> None:
        self._folder = _private(folder)
        self.launcher = secrets.token_hex(8)
        self._opened: list[int] = []
        self._is_over = False
        try:
            self._lock = self._locked(self._folder / _LOCK, "another launcher")
            try:
                data = (self._folder / _JOB).read_bytes()
            except FileNotFoundError:
                data = None
            self._job = job_of_state(data, command, config, token, self._error, f"remove {self._folder}")
            self.job_id, self.token = self._job.job_id, self._job.token
            self.number, self.lost = self._job.number, ""
            self._data = self._former_journal()
            self.is_continued = self._data is not None or bool(self.lost)
            owner = Owner(self.launcher, os.uname().nodename, os.getpid())
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, msgspec.json.encode(owner), 0)
            os.fsync(self._lock)
        except OSError as error:
            self.close()
            raise self._error(f"{error.strerror} ({error.filename or 'lock'})") from error
        except BaseException:
            self.close()
            raise

    @property
    def checkpoint(self) -> CheckpointEnv | None:
        return self._job.checkpoint

    def begin(self, checkpoint: CheckpointEnv | None) -> None:
        """Take the job over, or begin it: from now on the journal of this launcher counts. Raises ConfigError."""
        number = self.number = self._job.number + 1
        try:
            files = []
            for path in self._journal_paths(number):
                path.unlink(missing_ok=True)
                files.append(self._locked(path, "another launcher"))
            self.journal_files = (files[0], files[1])
            if self._data is not None:
                journal = Journal(self.journal_files, self.job_id, is_durable=True)
                for _ in files:  # an empty file would say that the job begins
                    journal.write(self._data)
            self._job = msgspec.structs.replace(
                self._job,
                version=SOFTWARE,
                format=FORMAT,
                number=number,
                checkpoint=checkpoint,
                is_continued=self.is_continued,
            )
            replace_file(self._folder / _JOB, msgspec.json.encode(self._job), is_durable=True)
        except OSError as error:
            raise self._error(f"no files can be written there: {error.strerror}") from error
        self._remove_journals(but=number)

    def successor(self) -> str:
        """Return who has taken the job over; empty: nobody has, as far as the folder can be read. May take long on a
        network file system."""
        owner = self._owner()
        return "" if owner is None or owner.launcher == self.launcher else str(owner)

    def end(self, is_over: bool) -> None:
        """Forget the job, if it is over or has never begun. Idempotent."""
        if self._is_over or self.successor():
            return
        with contextlib.suppress(JournalError, OSError):
            files = getattr(self, "journal_files", None)
            if not self.lost:
                is_over |= files is None and self._data is None
                is_over |= files is not None and Journal(files, self.job_id).read() is None
        if is_over:
            self._is_over = True
            with contextlib.suppress(OSError):
                (self._folder / _JOB).unlink(missing_ok=True)
                self._remove_journals(but=0)
                os.ftruncate(self._lock, 0)

    def close(self) -> None:
        """Unlock it. Idempotent."""
        opened, self._opened = self._opened, []
        for descriptor in opened:
            os.close(descriptor)

    # Its files --------------------------------------------------------------------------------------------

    def _locked(self, path: Path, by: str) -> int:
        """Open and lock a file. Raises ConfigError when others have it locked, and OSError."""
        # Close-on-exec, or workers would inherit the lock and hold it after this process.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._opened.append(descriptor)
        until_s = now_s() + _RELEASED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if now_s() > until_s:
                    owner = self._owner()
                    who = "" if owner is None else f" ({owner})"
                    raise self._error(
                        f"{by}{who} has locked it; end that job first (Ctrl-C, or kill its process), or give another "
                        "folder"
                    ) from None
                select.select([], [], [], _AGAIN_S)

    def _owner(self) -> Owner | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self._folder / _LOCK).read_bytes(), type=Owner)
        return None

    def _former_journal(self) -> bytes | None:
        """Return the newest state of the former launcher's coordinators, none of which runs; None: there is none, or it
        is lost."""
        if not self._job.number:
            return None
        paths = self._journal_paths(self._job.number)
        missing = [path.name for path in paths if not path.exists()]
        files = [self._locked(path, "the coordinator of the former launcher") for path in paths if path.exists()]
        if missing:
            self.lost = f"{' and '.join(missing)} is missing"
            return None
        try:
            data = Journal((files[0], files[1]), self.job_id).read()
        except JournalDamaged as error:
            self.lost = str(error)
            return None
        except JournalError as error:
            raise self._error(f"{error}; to begin the job anew, remove {self._folder}") from None
        if data is None and self._job.is_continued:
            self.lost = "the journal of the former launcher, which had taken the job over, has no state"
        return data

    def _journal_paths(self, number: int) -> list[Path]:
        return [self._folder / f"journal-{number}-{index}" for index in (0, 1)]

    def _remove_journals(self, but: int) -> None:
        kept = self._journal_paths(but)
        for path in self._folder.glob("journal-*"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"--state {self._folder}: {text}")


def job_of_state(
    data: bytes | None,
    command: Sequence[str],
    config: JobConfig,
    token: bytes | None,
    error: Callable[[str], ConfigError],
    removal: str,
) -> StoredJob:
    """Return the encoded job of a state, or a new one where there is none. `error` makes the ConfigError of a text,
    which is raised when it is damaged, or of another job or version; `removal`: what the user does to remove it."""
    # Those that must not change. The folder of certificates may differ between machines.
    settings = {name: value for name, value in msgspec.to_builtins(asdict(config)).items() if name != "tls"}
    if data is None:
        return StoredJob(
            version=SOFTWARE,
            format=FORMAT,
            job_id=secrets.token_hex(8),
            token=token or new_token(),
            number=0,
            command=tuple(command),
            config=settings,
        )
    anew = f"to begin the job anew, {removal}"
    try:
        found = msgspec.json.decode(data, type=_Version)
        if problem := why_unreadable(found.format, found.version):
            raise error(f"its job {problem}; {anew}")
        job = msgspec.json.decode(data, type=StoredJob)
    except msgspec.MsgspecError:
        raise error(f"its job is damaged ({len(data)} bytes); {anew}") from None
    if job.command != tuple(command):
        raise error(
            f"its job runs {' '.join(job.command)}, not {' '.join(command)}; give the same command, or another "
            f"--state; {anew}"
        )
    defaults = {each.name: each.default for each in fields(JobConfig)}  # of options that the version did not have
    if different := [name for name in settings if settings[name] != job.config.get(name, defaults[name])]:
        (name, *_) = different
        raise error(
            f"its job was begun with other options ({name} {job.config.get(name)!r}, not {settings[name]!r}); give "
            f"the same options, or another --state; {anew}"
        )
    if token is not None and token != job.token:
        raise error("its job has another token; give the same --token-file, or another --state")
    return job


def _private(folder: Path) -> Path:
    folder = Path(os.path.abspath(folder))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"--state {folder}: the folder cannot be created: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"--state {folder}: it holds the job's token, and must be a folder of this user that nobody else can enter "
            f"(it has owner {found.st_uid}, mode {stat.filemode(found.st_mode)}): chmod 700 {folder}"
        )
    return folder


# Copies of the coordinator's states, where the next launcher looks for them -------------------------------------------


class CopiesFailed(FarandoleError):
    """No copy could be written for as long as the patience."""


class StateCopies:
    """Writes one copy after the other, in a thread: the event loop runs on.

    write      as write_copy of JobState
    patience_s for so long a copy is tried again
    problem    why the newest copy could not be written yet; empty: it could, or nothing was tried
    """

    def __init__(self, write: Callable[[bytes], None], patience_s: float, on_event: Callable[[Event], None]) -> None:
        self._write, self._patience_s, self._on_event = write, patience_s, on_event
        self._turn = asyncio.Lock()
        self.problem = ""

    async def write(self, files: JournalFiles, job_id: str) -> None:
        """Write the newest state of a journal. Raises CopiesFailed."""
        async with self._turn:
            began_s = now_s()
            while not await self._was_written(files, job_id):
                waited_s = now_s() - began_s
                if waited_s > self._patience_s:
                    raise CopiesFailed(
                        f"the state of the job could not be written for {waited_s:.0f} s ({self.problem})"
                    )
                await asyncio.sleep(_COPY_AGAIN_S)
            if self.problem:
                self.problem = ""
                self._on_event(StateWritten(now_s() - began_s))

    async def _was_written(self, files: JournalFiles, job_id: str) -> bool:
        try:
            await asyncio.to_thread(lambda: self._write(Journal(files, job_id).newest()))
        except StateUnavailable as error:
            if not self.problem:
                self._on_event(StateUnwritten(str(error), self._patience_s))
            self.problem = str(error)
            return False
        return True
