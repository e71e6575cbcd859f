"""Starts `farandole ...`, or a script alone, by the job server (job_server.py), which takes milliseconds in place of
seconds of imports.

What is started is used like a process of subprocess.Popen. One job server serves this process: the first job starts it,
or a later one should it have died.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).parents[2]

_START_S = 60.0
_END_S = 30.0
_GONE_S = 6.0  # until what a job has killed is gone, and its guard has cleaned up
_ENVIRONMENT = dict(os.environ)  # as it was before any test changed it
# Read when Python or a library is loaded, which the job server has done already.
_READ_EARLY = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH_", "CUDA_", "NCCL_", "LD_", "LC_", "LANG")
_SET_BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # scikit-learn sets them for the process that imports it


class Launched:
    """A running `farandole ...` with an empty standard input. Ask for left() in the end, or use it in a `with`."""

    def __init__(self, program: str, arguments: Sequence[str], connection: socket.socket) -> None:
        self.args, self._connection = [program, *arguments], connection
        self._said: dict[str, Any] = {}
        self._buffer = b""
        self._hear("pid", _START_S)
        self.pid: int = self._said["pid"]

    @property
    def returncode(self) -> int | None:
        code: int | None = self._said.get("code")
        return code

    def poll(self) -> int | None:
        self._hear("code", 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if not self._hear("code", timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code: int = self._said["code"]
        return code

    def left(self) -> list[str]:
        """The processes that were there some seconds after the end, which have been killed: their command lines. Waits
        for the end."""
        if not self._hear("left", _END_S):
            raise TimeoutError(f"the job server has not ended what {self.args} left behind within {_END_S:g} s")
        left: list[str] = self._said["left"]
        return left

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        self.left()

    def _hear(self, wanted: str, timeout_s: float | None) -> bool:
        """Wait until the keeper has said this; False: it did not."""
        if wanted in self._said:
            return True
        until_s = time.monotonic() + (timeout_s or 0.0)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while wanted not in self._said:
            left_ms = None if timeout_s is None else max(0.0, until_s - time.monotonic()) * 1000
            if not poll.poll(left_ms):
                return False
            data = self._connection.recv(65536)
            if not data:
                raise RuntimeError(f"the job server's keeper of {self.args} has died; its standard error says why")
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._said.update(json.loads(line))
            if "left" in self._said:  # the last word
                self._connection.close()
        return True


def launch(
    arguments: Sequence[str],
    output: IO[Any],
    error: IO[Any],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    program: str = "farandole",
    gone_s: float = _GONE_S,
) -> Launched:
    """Start `farandole ARGUMENTS`.

    output, error  files for its standard output and standard error
    environment    all of it; None: this process's own
    folder         its current directory; None: this process's own
    program        "horovodrun" in its place; "python": the first argument is a script, which runs without a launcher
    gone_s         how long what the job leaves behind may take to end by itself
    """
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(_server(), [b"j"], [theirs.fileno(), output.fileno(), error.fileno()])
    asked = {
        "program": program,
        "arguments": [*arguments],
        "environment": dict(os.environ if environment is None else environment),
        "folder": str(folder or Path.cwd()),
        "gone_s": gone_s,
    }
    ours.sendall(json.dumps(asked).encode() + b"\n")
    return Launched(program, arguments, ours)


def needs_imports_of_its_own(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this environment, or this process's own, differs from the job server's in what is read early."""
    wanted = os.environ if environment is None else environment
    names = [name for name in {*wanted, *_ENVIRONMENT}.difference(_SET_BY_IMPORTS) if name.startswith(_READ_EARLY)]
    return any(wanted.get(name) != _ENVIRONMENT.get(name) for name in names)


_process: subprocess.Popen[bytes] | None = None
_channel: socket.socket | None = None


def _server() -> socket.socket:
    """A connection to the job server, which is ready."""
    global _process, _channel
    if _process is not None and _process.poll() is None and _channel is not None:
        return _channel
    if _process is None:
        atexit.register(_end_server)
    else:
        _end_server()
    _channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        _process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.job_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**_ENVIRONMENT, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for this process, which ends its jobs
        )
    _channel.settimeout(_START_S)
    assert _channel.recv(100) == b"ready", "the job server did not start; its standard error says why"
    return _channel


def _end_server() -> None:
    """It ends when its channel is closed. Jobs go on as long as somebody has hold of them."""
    if _process is not None and _channel is not None:
        _channel.close()
        _process.wait(_END_S)
