"""The interface of a started process, and the plain way to start one. Used by process.py."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Protocol


class Child(Protocol):
    """A child of this process, leader of a session and of a process group of its own.

    stdout, stderr  the reading ends of its pipes
    """

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]

    def wait(self) -> int:
        """Reap the process and return the exit code as subprocess gives it. Blocks until it has exited."""
        ...


def worker_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment: `env`, and PYTHONUNBUFFERED=1 unless it is set otherwise, because the last output
    of a killed worker matters most."""
    return {"PYTHONUNBUFFERED": "1", **env}


def start(argv: Sequence[str], env: Mapping[str, str]) -> Child:
    """Start a program with exactly this environment. Raises OSError when that is impossible."""
    return _Started(
        subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    )


class _Started:
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.pid, self.stdout, self.stderr = popen.pid, popen.stdout, popen.stderr
        self._popen = popen

    def wait(self) -> int:
        return self._popen.wait()
