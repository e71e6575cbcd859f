"""Jobs that start in milliseconds, one after the other: the client of job_server.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """code     exit code of the launcher; negative: the signal that killed it
    seconds  from its start to its end
    late     it was ended because it took longer than it might
    left     processes that it left behind
    """

    code: int
    seconds: float
    late: bool
    left: list[str]


class JobServer:
    """Runs one job at a time. Use it in a `with`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [sys.executable, "-m", "tests.support.job_server"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT, text=True)

    def __enter__(self) -> JobServer:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the job server did not start; see its output"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30.0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], deadline_s: float) -> Ended:
        """`farandole ARGUMENTS` with this environment added to ours; what it prints is appended to `folder`/output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "arguments": [*arguments],
            "folder": str(folder),
            "output": str(folder / "output"),
            "environment": {**environment},
            "deadline_s": deadline_s,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))
