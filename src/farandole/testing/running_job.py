"""A real `farandole run` whose workers write records, and on which a test, benchmark or demo acts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from farandole.job.coordinator.coordinator_factory import COORDINATOR_NAME, FACTORY_NAME

_POLL_S = 0.002
_STOP_S = 20.0

FARANDOLE_RUN = (sys.executable, "-m", "farandole", "run")
_CODE = "import sys; from farandole.integrations.horovod.horovodrun import main; sys.exit(main())"
HOROVODRUN = (sys.executable, "-c", _CODE)  # the command belongs to a separate distribution


class RunningJob:
    """Starts `farandole run [flags] python script [arguments] --records folder`; ends it on leaving the `with`.

    folder  an empty folder for the records (step_records.py)
    output  the destination of the job's output: None for this process's own, or a path
    program FARANDOLE_RUN, or HOROVODRUN in its place
    environment  of the job; None: this process's own
    """

    def __init__(
        self,
        flags: Sequence[str],
        script: Path,
        arguments: Sequence[str],
        folder: Path,
        output: Path | None = None,
        program: Sequence[str] = FARANDOLE_RUN,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._ended: dict[str, int] = {}  # size of the records of a worker that has ended
        command = [*program, *flags, sys.executable, str(script), *arguments]
        with contextlib.ExitStack() as files:
            sink = files.enter_context(output.open("wb")) if output is not None else None
            self.process = self._start([*command, "--records", str(folder)], sink, environment)

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _start(
        self, command: Sequence[str], output: IO[bytes] | None, environment: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        """Start the launcher, with this file for its standard output and error. A subclass may override it."""
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT if output else None, env=environment)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        return self.process.wait(timeout_s)

    def latest(self) -> dict[int, dict[str, Any]]:
        """Return the newest complete record of each worker process of the newest generation, by rank.

        "has_applied" is added to it: whether the worker has applied a step in this generation.
        """
        records = []
        for path in self.folder.glob("worker-*.jsonl"):
            if path.stat().st_size == self._ended.get(path.name):
                continue
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 8192))
                lines = file.read().split(b"\n")
            if len(lines) > 2:  # the first may be cut off at its start, the last one is not complete yet
                record = json.loads(lines[-2])
                # A step is two records, "before" and "after". The second of them is missing where it was aborted.
                previous = json.loads(lines[-3]) if len(lines) > 3 else {}
                applied = "after" in record or ("after" in previous and previous["generation"] == record["generation"])
                records.append(record | {"has_applied": applied})
        newest = max((record["generation"] for record in records), default=0)
        return {record["rank"]: record for record in records if record["generation"] == newest}

    def wait_until(
        self, condition: Callable[[dict[int, dict[str, Any]]], bool], timeout_s: float
    ) -> dict[int, dict[str, Any]]:
        """Return the first latest() that fulfils the condition. Raises TimeoutError, also when the job ends first."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            latest = self.latest()
            if condition(latest):
                return latest
            time.sleep(_POLL_S)
        raise TimeoutError(
            f"the condition was not reached; exit code {self.process.poll()}, latest records: {self.latest()}"
        )

    def forget(self, record: dict[str, Any]) -> None:
        """Exclude an ended worker from latest(), unless another one gets the same process id."""
        name = f"worker-{record['pid']}-{record['host']}.jsonl"
        self._ended[name] = (self.folder / name).stat().st_size

    def kill(self, pid: int, number: int = signal.SIGKILL) -> int:
        """Send a signal to a worker; return the monotonic clock in nanoseconds right before."""
        now = time.monotonic_ns()
        os.kill(pid, number)
        return now


def all_writing(size: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
    """Return the condition that `size` workers of one generation have each written a record in it."""
    return lambda latest: len(latest) == size and all(record["size"] == size for record in latest.values())


def all_training(size: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
    """Return the condition that `size` workers of one generation have each applied a step in it."""
    are_writing = all_writing(size)
    return lambda latest: are_writing(latest) and all(record["has_applied"] for record in latest.values())


def coordinator_below(launcher: int) -> int | None:
    """Return the process of a launcher's coordinator, without a question to it; None: there is none now."""
    found = (pid for factory in factories_below(launcher) for pid in _children(factory))
    return next((pid for pid in found if _name(pid) == COORDINATOR_NAME), None)


def factories_below(launcher: int) -> list[int]:
    """Return the processes that fork a launcher's coordinators: one, unless it has just been replaced."""
    return [pid for pid in _children(launcher) if _name(pid) == FACTORY_NAME]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # a thread, or the process, has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
