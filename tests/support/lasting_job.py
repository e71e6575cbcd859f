"""A job on this machine that trains until a test lets it end, with its events and its coordinator."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from farandole.job.launch.job_files import running
from tests.support import jobs
from tests.support.jobs import ELASTIC_JOB, farandole

_LONG_S = 60.0


class LastingJob(jobs.RunningJob):
    """Trains until finish() is called."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._stop, self._output, self._events = folder / "stop", folder / "output", folder / "events.jsonl"
        words = ["--epochs", "1000000", "--stop", str(self._stop), "--item-ms", "1"]
        super().__init__(["--events", str(self._events), *flags], ELASTIC_JOB, words, folder, self._output)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self._output.read_text())
        super().__exit__(kind, error, trace)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind. The last line may not be complete yet."""
        lines = self._events.read_bytes().split(b"\n")[:-1] if self._events.exists() else []
        return [each for each in map(json.loads, lines) if each["event"] == kind]

    def coordinator(self) -> tuple[int, int]:
        """The process and the epoch of the coordinator that answers."""
        deadline_s = time.monotonic() + _LONG_S
        while time.monotonic() < deadline_s:
            name = next(each.job for each in running() if each.pid == self.process.pid)
            done = farandole("status", "--job", name, "--json")
            if done.returncode == 0:
                status = json.loads(done.stdout)
                return status["coordinator_pid"], status["coordinator_epoch"]
        raise TimeoutError(done.stderr)

    def kill_coordinator(self, number: int = signal.SIGKILL) -> None:
        pid, epoch = self.coordinator()
        os.kill(pid, number)
        assert self.coordinator()[1] == epoch + 1

    def finish(self) -> None:
        self._stop.touch()
        assert self.wait(_LONG_S) == 0, self._output.read_text()


def further(latest: dict[int, dict[str, Any]]) -> Any:
    """The condition that each of these workers has made steps since."""
    return lambda now: all(step(now[rank]) > step(each) + 5 for rank, each in latest.items() if rank in now)


def step(record: dict[str, Any]) -> int:
    return int(record.get("before", record.get("after", 0)))
