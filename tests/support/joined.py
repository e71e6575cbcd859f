"""Real jobs with agents of their own processes, as on other machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.jobs import ELASTIC_JOB, RunningJob, check_nothing_is_left, start

AGENT = (sys.executable, "-m", "farandole", "agent")
_DEADLINE_S = 20.0


class AgentProcess:
    """`farandole agent`; killed on leaving the `with`. What it says is in `output`."""

    def __init__(
        self, address: str, token_file: Path, output: Path, host: str = "b", flags: Sequence[str] = ()
    ) -> None:
        self.output = output
        command = [*AGENT, "--join", address, "--token-file", str(token_file), "--host", host, *flags]
        with output.open("ab") as sink:
            self.process = start(command, sink)
        self.pid = self.process.pid

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        check_nothing_is_left(self.process)

    def wait(self) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        return self.process.wait(_DEADLINE_S)

    def said(self) -> str:
        return self.output.read_text()


class JoinedJob:
    """`farandole run` of elastic_job.py that trains until `stop()`; agents may join. To be used in a `with`."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.folder, self.token_file, self._output = folder, folder / "token", folder / "run.log"
        self.records = folder / "records"
        self.records.mkdir()
        self.running = RunningJob(
            ["--token-file", str(self.token_file), "--verbose", *flags],
            ELASTIC_JOB,
            ["--epochs", "100000", "--stop", str(folder / "stop")],
            self.records,
            self._output,
        )
        self.address = self._address()

    def __enter__(self) -> JoinedJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.said())
        self.running.__exit__(kind, error, trace)

    def agent(self, *flags: str, host: str = "b") -> AgentProcess:
        return AgentProcess(self.address, self.token_file, self.folder / f"agent-{host}.log", host, flags)

    def stop(self) -> int:
        """The exit code, soon."""
        (self.folder / "stop").touch()
        return self.running.wait(_DEADLINE_S)

    def said(self) -> str:
        return self._output.read_text()

    def wait_until_said(self, text: str, timeout_s: float = _DEADLINE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.said():
            if time.monotonic() > deadline_s or self.running.process.poll() is not None:
                raise TimeoutError(f"{text!r} was not said:\n{self.said()}")
            time.sleep(0.01)

    def _address(self) -> str:
        self.wait_until_said("--join ")
        return self.said().split("--join ")[1].split()[0]
