"""Real jobs for tests: run `farandole run`, read what it said, and see what it left behind.

Jobs are started by the job server (launching.py), whose launchers and workers find torch imported. A test of imports,
of the environment, of how processes are started, or of signals to a process group runs `fresh` processes instead, or
takes farandole.testing.running_job.RunningJob. A job whose environment differs from the job server's in what Python or
a library reads when it is loaded is always fresh.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from farandole.testing import running_job
from farandole.testing.proof import Proof
from farandole.testing.running_job import HOROVODRUN
from tests.support.launching import Launched, launch, needs_imports_of_its_own

SCRIPTS = Path(__file__).parents[1] / "scripts"
ELASTIC_JOB = SCRIPTS / "elastic_job.py"

_FARANDOLE = [sys.executable, "-m", "farandole"]
_PROGRAMS = {tuple(_FARANDOLE): "farandole", HOROVODRUN: "horovodrun"}
"""What the job server starts, by the beginnings of their command lines."""


def farandole_run(*words: str, timeout_s: float = 60.0, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `farandole run ...` to its end. It may leave no process behind."""
    return farandole("run", *words, timeout_s=timeout_s, fresh=fresh)


def farandole(*words: str, timeout_s: float = 60.0, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `farandole ...` to its end. It may leave no process behind."""
    return _run([*_FARANDOLE, *words], timeout_s, fresh)


def horovodrun(*words: str, timeout_s: float = 60.0, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `horovodrun ...` to its end. It may leave no process behind."""
    return _run([*HOROVODRUN, *words], timeout_s, fresh)


def run_alone(
    script: Path, *words: str, timeout_s: float = 120.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ...` to its end, a single process without a launcher. It may leave no process behind."""
    return _run_program("python", [sys.executable, str(script), *words], 1, timeout_s, fresh)


def _run(command: Sequence[str], timeout_s: float, fresh: bool) -> subprocess.CompletedProcess[str]:
    return _run_program(_PROGRAMS[tuple(command[:3])], command, 3, timeout_s, fresh)


def _run_program(
    program: str, command: Sequence[str], words: int, timeout_s: float, fresh: bool
) -> subprocess.CompletedProcess[str]:
    """Run a command, of which so many words are the program, to its end."""
    if fresh or needs_imports_of_its_own():
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        job = launch(command[words:], output, error, program=program)
        try:
            code = job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            job.kill()
            job.left()
            print(_text(output), _text(error))
            raise
        assert job.left() == [], f"left behind by {command}"
        return subprocess.CompletedProcess([*command], code, _text(output), _text(error))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


class RunningJob(running_job.RunningJob):
    """A job of the job server; on leaving the `with` there may be no process left of it."""

    is_fresh = False
    """For a subclass: whether to start it without the job server."""

    def _start(
        self, command: Sequence[str], output: IO[bytes] | None, environment: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        return (
            start(command, output, environment)
            if output and not self.is_fresh
            else super()._start(command, output, environment)
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        check_nothing_is_left(self.process)


def check_nothing_is_left(process: subprocess.Popen[bytes] | Launched) -> None:
    """Of a job of the job server that has ended. There is no way to see what another process has left."""
    if isinstance(process, Launched):
        assert process.left() == [], f"left behind by {process.args}"


def start(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command, with a file for its standard output and error; by the job server if it is `python -m farandole
    ...` or horovodrun."""
    program = _PROGRAMS.get(tuple(command[:3]))
    if program is None or needs_imports_of_its_own(environment):
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    # It is used in the same way.
    return launch(command[3:], output, output, environment, program=program)  # type: ignore[return-value]


def check_job(proof: Proof, samples: int, epochs: int | None = None, workers_at_end: int | None = None) -> None:
    """What must hold at the end of every job, whatever happened on the way. Without `epochs`, for any number."""
    result = proof.epochs(samples)
    assert result.lost == {}
    assert result.repeated == {}
    assert epochs is None or result.complete == epochs
    ends = proof.ends()
    assert ends, "no worker came to its end"
    if workers_at_end is not None:
        assert len(ends) == workers_at_end
    assert {end["end"] for end in ends} == {proof.steps()}
    assert all(end["scheduler_last_epoch"] == end["end"] for end in ends)
    assert len({end["parameters"] for end in ends}) == 1
    assert all(end["result"] == end["end"] for end in ends)


def processes_with(needle: str) -> list[int]:
    """Processes whose command line or environment has `needle` in it, without this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle.encode() in text:
            found.append(int(entry.name))
    return found
