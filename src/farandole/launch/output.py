"""The output of the workers: each line with its rank in front, and on request in files."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TextIO

from farandole.clock import wall_time_s
from farandole.config import JobConfig
from farandole.errors import ConfigError
from farandole.launch.nonblocking_writer import OWN_PREFIX, BackgroundWriter, unbuffered, write_all
from farandole.launch.tracebacks import TracebackFolder

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
        if self.directory is not None:
            make_writable(self.directory)


def output_options(config: JobConfig, directory: str | Path | None, prefix_timestamp: bool) -> OutputOptions:
    """Return the options for a job of this size. Raises ConfigError when no files can be written to the directory."""
    digits = len(str((config.max_np or config.num_proc) - 1))
    return OutputOptions(None if directory is None else Path(directory), prefix_timestamp, digits)


class OutputSink:
    """Shows the lines of all workers: `[2] loss 0.31` is from rank 2, `[w3] ...` from worker w3 before it has a rank.
    Lines of stderr go to `stderr`; the streams are sys.stdout and sys.stderr unless given.

    Use it on a running event loop; no call waits for the terminal or the disk. An error of either is reported once and
    does not stop the job.
    """

    def __init__(self, options: OutputOptions, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        stdout, stderr = stdout or sys.stdout, stderr or sys.stderr
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
            write_all(self._streams[stream], data)
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


@dataclass(frozen=True)
class RankFile:
    """The file for lines."""

    folder: str
    stream: str


@dataclass(frozen=True)
class Move:
    """A move: the contents of folder `old` of a stream go to the end of that in folder `new`."""

    old: str
    new: str
    stream: str


def make_writable(directory: Path) -> None:
    """Make the directory, and try whether files can be written there. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"--output-filename {directory}: no files can be written there ({error.strerror})") from error


class RankFiles:
    """Appends to files below `directory`; a replacement continues in the files of the worker that it replaces."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[RankFile, BinaryIO] = {}

    def append(self, target: RankFile, data: bytes) -> None:
        """Write `data` at the end of this file. Raises OSError."""
        write_all(self._open(target), data)

    def move(self, asked: Move) -> None:
        """Append the old file, if it has any data, to the new one, and remove the old one. Raises OSError."""
        old, new = RankFile(asked.old, asked.stream), RankFile(asked.new, asked.stream)
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
            path.parent.mkdir(exist_ok=True)
            file = self._files[target] = path.open("ab", buffering=0)
        return file

    def _path(self, target: RankFile) -> Path:
        return self._directory / target.folder / target.stream

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
