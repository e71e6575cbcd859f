"""The output of the workers of `farandole torchrun`: on the console as they wrote it, and in the files of torchrun; and
the report of the failures that ended the job. Used by torchrun_command.py.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from farandole.base.events.event import Event
from farandole.base.events.worker_events import WorkerFailed, WorkerSpawned
from farandole.base.machine import wall_time_s
from farandole.errors import ConfigError
from farandole.integrations.torchrun.torchrun_options import TorchrunOptions
from farandole.job.launch.output import OutputOptions, OutputSink, RankFile
from farandole.job.launch.terminal_line import TerminalLine

_LONGEST_WIDTH = 60
_RECORD = "https://pytorch.org/docs/stable/elastic/errors.html"


def run_folder(options: TorchrunOptions) -> Path | None:
    """Make the folder of this run's files and return it; None where there are none. Raises ConfigError when that
    fails."""
    if options.log_dir == os.devnull or not (options.log_dir or options.redirects or options.tee):
        return None
    try:
        if options.log_dir is None:
            base = Path(tempfile.mkdtemp(prefix="torchelastic_"))
        else:
            base = Path(options.log_dir).absolute()
            base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{options.run_id}_", dir=base))
    except OSError as error:
        raise ConfigError(f"--log-dir {options.log_dir}: no files can be written there ({error.strerror})") from error


@dataclass(frozen=True)
class _Place:
    rank: int
    local_rank: int
    attempt: int


class Places:
    """The places for which workers are started. Give it all events of the job."""

    def __init__(self) -> None:
        self.of_workers: dict[str, _Place] = {}

    def on_event(self, event: Event) -> None:
        """Learn the place of a worker that is started."""
        if isinstance(event, WorkerSpawned) and event.rank is not None and event.local_rank is not None:
            self.of_workers[event.worker] = _Place(event.rank, event.local_rank, event.attempt)


class TorchrunOutput(OutputSink):
    """Shows the lines of the workers without a prefix, unless they are written to files as well (--tee). `folder`: of
    the files; None: there are none."""

    def __init__(
        self,
        options: TorchrunOptions,
        folder: Path | None,
        places: Places,
        line: TerminalLine | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        super().__init__(OutputOptions(folder), line, stdout, stderr)
        self._torchrun, self._prefix = options, _Prefix(options.prefix, options.role)
        self._places = places.of_workers

    def expected(self, worker: str, rank: int) -> None:
        """Do nothing: the event has told the rank."""

    def placed(self, worker: str, rank: int) -> None:
        """Do nothing: the files are those of the place for which a worker was started."""

    def line(self, worker: str, stream: str, data: bytes) -> None:
        """Show a line of "stdout" or "stderr", without its end, and write it to its file."""
        options, place = self._torchrun, self._places.get(worker)
        if place is None:  # the last lines of a host that was lost
            self._console.put(stream, data + b"\n")
            return
        is_teed = options.tee.has(place.local_rank, stream)
        is_redirected = options.redirects.has(place.local_rank, stream)
        if self._file_writer is not None and (is_teed or is_redirected):
            file = RankFile(f"attempt_{place.attempt}/{place.rank}", f"{stream}.log")
            self._file_writer.put(file, data + b"\n")
        is_wanted = options.only_ranks is None or place.local_rank in options.only_ranks
        if is_wanted and (is_teed or not is_redirected):
            prefix = self._prefix.of(place.rank, place.local_rank) if is_teed else b""
            self._console.put(stream, prefix + data + b"\n")

    def closed(self, worker: str) -> None:
        """Forget a worker that has ended and whose lines have all come."""
        self._places.pop(worker, None)


class _Prefix:
    """The prefix of a line, from a template as in torchrun: ${role_name}, ${rank} and ${local_rank} are replaced
    (torch/distributed/elastic/agent/server/local_elastic_agent.py of torch 2.13). Default: `[default0]:`."""

    def __init__(self, template: str | None, role: str) -> None:
        self._template, self._role = template, role

    def of(self, rank: int, local_rank: int) -> bytes:
        if self._template is None:
            return f"[{self._role}{local_rank}]:".encode()
        values: Mapping[str, object] = {"role_name": self._role, "rank": rank, "local_rank": local_rank}
        text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: _value(found, values), self._template)
        return text.encode()


def _value(found: re.Match[str], values: Mapping[str, object]) -> str:
    return str(values.get(found[1] or found[2], found[0]))


# The report of the failures -------------------------------------------------------------------------------------------


class FailureReport:
    """Collects the failures of the last attempt. Give it all events of the job."""

    def __init__(self) -> None:
        self._failures: list[tuple[int, WorkerFailed]] = []  # with the time in seconds since 1970

    def on_event(self, event: Event) -> None:
        """Remember a failure; those of an attempt that was followed by another one do not matter any more."""
        if isinstance(event, WorkerFailed):
            if self._failures and self._failures[-1][1].attempt != event.attempt:
                self._failures = []
            self._failures.append((event.time_s or int(wall_time_s()), event))
        elif isinstance(event, WorkerSpawned) and event.attempt:
            self._failures = [each for each in self._failures if each[1].attempt == event.attempt]

    def text(self, name: str) -> str:
        """Return the report as torchrun writes it (ChildFailedError.format_msg() in
        torch/distributed/elastic/multiprocessing/errors); empty if there was no failure. The root cause is the earliest
        failure, of several in the same second the one that was observed first. `name`: that of the script."""
        if not self._failures:
            return ""
        root = min(range(len(self._failures)), key=lambda index: (self._failures[index][0], index))
        texts = [_describe(index, time_s, failure) for index, (time_s, failure) in enumerate(self._failures)]
        title = f"{name} FAILED"
        lines = [line for text in (title, *texts) for line in text.splitlines()]
        width = min(max(map(len, lines)), _LONGEST_WIDTH)
        others = [text for index, text in enumerate(texts) if index != root] or ["  <NO_OTHER_FAILURES>"]
        parts = ["=" * width, title, "-" * width, "Failures:", *others, "-" * width]
        return "\n".join([*parts, "Root Cause (first observed failure):", texts[root], "=" * width])


def _describe(index: int, time_s: int, failure: WorkerFailed) -> str:
    name = _signal_name(failure.exit_code)
    code = "<N/A>" if failure.exit_code is None else str(failure.exit_code)
    if failure.traceback or failure.message:
        message = (failure.traceback or failure.message).rstrip().replace("\n", "\n  ")
    elif failure.exit_code is None:
        message = "its host was lost"
    elif name:
        message = f"Signal {-failure.exit_code} ({name}) received by PID {failure.pid}"
    else:
        message = f"To enable traceback see: {_RECORD}"
    rows = (
        ("time", datetime.fromtimestamp(time_s).isoformat(sep="_")),
        ("host", failure.host),
        ("rank", f"{failure.rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{code} (pid: {failure.pid}){f' ({name})' if name else ''}"),
        ("error_file", failure.error_file or "<N/A>"),
        ("traceback", message),
    )
    return "\n".join([f"[{index}]:", *(f"  {label:<10}: {value}" for label, value in rows)])


def _signal_name(exit_code: int | None) -> str:
    """Return the name of the signal that ended a process; empty for another end."""
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return "<N/A>"
