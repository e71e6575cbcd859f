"""The output of the workers: each line with its rank in front, and on request in files."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Generic, NamedTuple, TextIO, TypeVar, cast

from farandole.base.machine import wall_time_s
from farandole.base.wire.sockets import can_write
from farandole.errors import ConfigError
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.tracebacks import TracebackFolder

if TYPE_CHECKING:
    from farandole.job.launch.terminal_line import TerminalLine

_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red: neighbours differ


@dataclass(frozen=True)
class OutputOptions:
    """The files for the workers' output beside the terminal, and its format.

    directory         for files by rank; made when it is missing
    prefix_timestamp  the local time in front of each line
    rank_digits       ranks in names of files are padded with zeros to this many digits, as Horovod does

    Raises ConfigError when no files can be written to the directory.
    """

    directory: Path | None = None
    prefix_timestamp: bool = False
    rank_digits: int = 1

    def __post_init__(self) -> None:
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            problem = f"no files can be written there ({error.strerror})"
            raise ConfigError(f"--output-filename {self.directory}: {problem}") from error


def output_options(spec: JobSpec) -> OutputOptions:
    """Return the options of a job. Raises ConfigError when no files can be written to its directory."""
    return OutputOptions(spec.output_directory, spec.prefix_timestamp, len(str(spec.config.most_workers - 1)))


class OutputSink:
    """Shows the lines of all workers: `[2] loss 0.31` is from rank 2, `[w3] ...` from worker w3 before it has a rank.
    Lines of stderr go to `stderr`; the streams are sys.stdout and sys.stderr unless given.

    Use it on a running event loop; no call waits for the terminal or the disk. An error of either is reported once and
    does not stop the job.

    line  stays below the lines of the workers; None: there is none
    """

    def __init__(
        self,
        options: OutputOptions,
        line: TerminalLine | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        stdout, stderr = stdout or sys.stdout, stderr or sys.stderr
        self._write_above: Callable[[BinaryIO, bytes], None] = write_all if line is None else line.write
        self._options = options
        self._streams = {"stdout": unbuffered(stdout), "stderr": unbuffered(stderr)}
        self._is_coloured = {"stdout": stdout.isatty(), "stderr": stderr.isatty()}
        self._ranks: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._folder = TracebackFolder()
        self._release_timer: asyncio.TimerHandle | None = None
        self._console = BackgroundWriter("console output", self._write_console, self._on_console_dropped)
        self._unwritable: set[str] = set()  # "stdout", "stderr", "files"
        self._files = RankFiles(options.directory) if options.directory is not None else None
        self._file_writer = (
            BackgroundWriter("output files", self._write_file, self._on_file_dropped) if self._files else None
        )

    def expected(self, worker: str, rank: int) -> None:
        """Note the rank that `worker` will most likely get. If it ends without a rank, its files are those of this
        rank."""
        self._expected[worker] = rank

    def placed(self, worker: str, rank: int) -> None:
        """Assign the lines of `worker` to this rank from now on; in the files also its earlier lines."""
        is_first = worker not in self._ranks
        self._ranks[worker] = rank
        if is_first:
            self._move_files(worker, rank)

    def line(self, worker: str, stream: str, data: bytes) -> None:
        """Show a line of "stdout" or "stderr", without its end."""
        if self._file_writer is not None:
            folder = self._rank_folder(self._ranks[worker]) if worker in self._ranks else worker
            self._file_writer.put(RankFile(folder, stream), data + b"\n")
        if stream == "stdout":
            self._show(worker, stream, [data])
            return
        now_s = asyncio.get_running_loop().time()
        self._show(worker, stream, self._folder.feed(worker, self._label(worker), data, now_s))
        self._set_release_timer()

    def closed(self, worker: str) -> None:
        """Finish a worker that has ended and whose lines have all come."""
        self._show(worker, "stderr", self._folder.release(worker, self._label(worker)))
        rank, expected = self._ranks.pop(worker, None), self._expected.pop(worker, None)
        if rank is None and expected is not None:
            self._move_files(worker, expected)

    def close(self) -> None:
        """Show and write the remaining lines; waits for that with a time limit. Idempotent."""
        if self._release_timer is not None:
            self._release_timer.cancel()
        self._release_due(float("inf"))
        if self._file_writer is not None and self._file_writer.close() and self._files is not None:
            self._files.close()
        self._console.close()

    def _label(self, worker: str) -> str:
        return f"[{self._ranks.get(worker, worker)}]"

    def _rank_folder(self, rank: int) -> str:
        return f"rank.{rank:0{self._options.rank_digits}d}"

    def _move_files(self, worker: str, rank: int) -> None:
        if self._file_writer is not None:
            for stream in self._streams:
                self._file_writer.put(Move(worker, self._rank_folder(rank), stream), b"")

    def _show(self, worker: str, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        label = self._label(worker)
        if self._is_coloured[stream]:
            label = f"\x1b[{_COLOURS[self._ranks.get(worker, 0) % len(_COLOURS)]}m{label}\x1b[0m"
        if self._options.prefix_timestamp:
            label = f"{datetime.fromtimestamp(wall_time_s()).isoformat(' ', 'milliseconds')} {label}"
        prefix = label.encode() + b" "
        self._console.put(stream, b"".join(prefix + line + b"\n" for line in lines))

    # Tracebacks are held back for a moment ----------------------------------------------------------------

    def _set_release_timer(self) -> None:
        deadline_s = self._folder.next_deadline_s()
        if deadline_s is not None and self._release_timer is None:
            self._release_timer = asyncio.get_running_loop().call_at(deadline_s, self._on_release_timer)

    def _on_release_timer(self) -> None:
        self._release_timer = None
        # The loop runs a timer up to one tick of its clock early.
        self._release_due(asyncio.get_running_loop().time() + 0.001)
        self._set_release_timer()

    def _release_due(self, now_s: float) -> None:
        for worker in self._folder.due(now_s):
            self._show(worker, "stderr", self._folder.release(worker, self._label(worker)))

    # In the writer threads --------------------------------------------------------------------------------

    def _write_console(self, stream: str, data: bytes) -> None:
        if stream in self._unwritable:
            return
        try:
            self._write_above(self._streams[stream], data)
        except OSError:  # `farandole run ... | head`, or the terminal is gone: there is no reader to be told
            self._unwritable.add(stream)

    def _on_console_dropped(self, dropped_bytes: int) -> None:
        self._put_note(f"the output was read too slowly; {dropped_bytes} bytes of it were dropped")

    def _write_file(self, target: RankFile | Move, data: bytes) -> None:
        assert self._files is not None
        if "files" in self._unwritable:
            return
        try:
            if isinstance(target, Move):
                self._files.move(target)
            else:
                self._files.append(target, data)
        except OSError as error:
            self._unwritable.add("files")
            self._put_note(
                f"no more output is written to {self._options.directory} ({error.strerror}); the job continues"
            )

    def _on_file_dropped(self, dropped_bytes: int) -> None:
        self._put_note(f"the disk of --output-filename is too slow; {dropped_bytes} bytes were not written")

    def _put_note(self, text: str) -> None:
        self._console.put("stderr", f"{OWN_PREFIX}{text}\n".encode())


# Files: `rank.N/stdout` and `rank.N/stderr`, the layout of Horovod's --output-filename --------------------------------
#
# The output of a worker before it has a rank is in `wN/` until then.

_COPY_BYTES = 1 << 20


class RankFile(NamedTuple):
    """The file for lines."""

    folder: str
    stream: str


class Move(NamedTuple):
    """A move: the contents of folder `old` of a stream go to the end of that in folder `new`."""

    old: str
    new: str
    stream: str


class RankFiles:
    """Appends to files below `directory`; a replacement continues in the files of the worker that it replaces."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[RankFile, BinaryIO] = {}

    def append(self, target: RankFile, data: bytes) -> None:
        """Write `data` at the end of this file. Raises OSError."""
        write_all(self._open(target), data)

    def move(self, asked: Move) -> None:
        """Append the old file, if there is one, to the new one, and remove the old one. The new one exists then in any
        case: programs that read these files expect both of a rank. Raises OSError."""
        old, new = RankFile(asked.old, asked.stream), RankFile(asked.new, asked.stream)
        self._open(new)
        file = self._files.pop(old, None)
        if file is None:
            return
        file.close()
        with self._path(old).open("rb") as early:
            while data := early.read(_COPY_BYTES):
                write_all(self._open(new), data)
        self._path(old).unlink()
        with contextlib.suppress(OSError):  # the other stream is still there
            self._path(old).parent.rmdir()

    def _open(self, target: RankFile) -> BinaryIO:
        file = self._files.get(target)
        if file is None:
            path = self._path(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[target] = path.open("ab", buffering=0)
        return file

    def _path(self, target: RankFile) -> Path:
        return self._directory / target.folder / target.stream

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


# The writer to the terminal -------------------------------------------------------------------------------------------

BACKLOG_BYTES = 64 << 20
"""Bytes that may wait to be written. Further data is dropped: training does not stop for its output."""

CLOSE_S = 5.0
"""Seconds that the last lines may take at the end of a job."""

OWN_PREFIX = "[farandole] "
"""Prefix of the launcher's own messages; the workers' output begins with their rank."""

Target = TypeVar("Target")


class BackgroundWriter(Generic[Target]):
    """Calls `write(target, data)` in a thread of its own, in the order of `put`; pieces that follow each other to the
    same target are joined. `write` must not raise. `on_dropped(bytes)` is called in that thread when writing continues
    after pieces had to be dropped."""

    def __init__(
        self,
        name: str,
        write: Callable[[Target, bytes], None],
        on_dropped: Callable[[int], None],
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self._write, self._on_dropped, self._backlog_bytes = write, on_dropped, backlog_bytes
        self._changed = threading.Condition()
        self._waiting: list[tuple[Target, bytes]] = []
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, target: Target, data: bytes) -> None:
        """Have `data` written soon. Never waits; ignored after `close`."""
        with self._changed:
            if self._is_closed:
                return
            if self._waiting_bytes + len(data) > self._backlog_bytes:
                self._dropped_bytes += len(data)
                return
            self._waiting.append((target, data))
            self._waiting_bytes += len(data)
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Finish, and return whether all was written within `timeout_s`; otherwise the thread is abandoned.
        Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                # Without a deadline: the thread has nothing else to do, and `close` always wakes it.
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                waiting, dropped_bytes = self._waiting, self._dropped_bytes
                self._waiting, self._waiting_bytes, self._dropped_bytes = [], 0, 0
            for target, pieces in groupby(waiting, key=itemgetter(0)):
                self._write(target, b"".join(data for _, data in pieces))
            if dropped_bytes:
                self._on_dropped(dropped_bytes)


def unbuffered(stream: TextIO) -> BinaryIO:
    """Return the unbuffered byte stream of a text stream: a thread that is blocked in a buffered write holds a lock
    that the interpreter needs when it exits."""
    stream.flush()
    binary = getattr(stream, "buffer", None)
    if binary is None:  # a notebook's
        return cast(BinaryIO, _TextOnly(stream))
    raw: BinaryIO = getattr(binary, "raw", binary)
    return raw


class _TextOnly:
    """Takes bytes for a stream that accepts text only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes | memoryview) -> int:
        self._stream.write(bytes(data).decode("utf-8", "backslashreplace"))
        self._stream.flush()
        return len(data)


def write_all(raw: BinaryIO, data: bytes) -> None:
    """Write all of `data`, and wait as long as needed. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written: int | None = raw.write(rest)
        if written is None:  # another process has made our terminal non-blocking
            can_write(raw, within_s=1.0)
        else:
            rest = rest[written:]
