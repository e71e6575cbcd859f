"""Runs `farandole run` in milliseconds: a process that has imported torch forks the launcher and its fork server. Used
through jobs.py, as `python -m tests.support.job_server`.

The launcher, the agent, the guard and the workers are those of a real job; only the imports are done beforehand. Each
line on standard input asks for one job, and each line on standard output tells how one ended (jobs.py has both).
Orphans of a job become children of this process, so that whatever a job leaves is seen.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.003
_STACKS_S = 0.5  # until the workers have written where they are
_GONE_S = 6.0  # until what a job has killed is gone, and its guard has cleaned up


def main() -> None:
    """Serve until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _import_all()
    gc.collect()
    gc.freeze()
    os.write(1, b"ready\n")
    while line := sys.stdin.readline():
        asked = json.loads(line)
        launcher = os.fork()
        if launcher == 0:
            _leave_server(asked)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if (server := os.fork()) == 0:
                ours.close()
                _end_quickly(_become_fork_server, theirs)
            theirs.close()
            _end_quickly(_launch, asked["arguments"], _Handover(server, ours))
        answer = _watch(launcher, asked)
        with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
            os.write(1, json.dumps(answer).encode() + b"\n")


def _import_all() -> None:
    from farandole.launch.fork_server_process import PRELOADED

    launcher = ("asyncio", "farandole.launch.local", "farandole.launch.control_commands", "farandole.horovod")
    for name in (*PRELOADED, *launcher, "torch.optim.swa_utils", "torch.nn.parallel", "torch.utils.data"):
        module = importlib.import_module(name)
        if name in PRELOADED and name.startswith("farandole"):
            for each in module.__all__:
                with contextlib.suppress(ImportError):
                    getattr(module, each)


def _end_quickly(program: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run it, and do what Python does at its end, but for taking all modules apart: that would copy most of the memory
    that this process shares with the server, and take longer than the job."""
    try:
        code: Any = program(*arguments)
    except SystemExit as exit:
        code = exit.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


# The launcher and its fork server -------------------------------------------------------------------------------


class _Handover:
    """A process that waits to become the launcher's fork server, and the way to tell it so."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection


def _leave_server(asked: Mapping[str, Any]) -> None:
    """Be a process of its own, with the output and environment of the job."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])


def _launch(arguments: Sequence[str], handover: _Handover) -> int:
    from farandole.launch import cli
    from farandole.launch.fork_server import ForkServer

    sys.argv = ["farandole", *arguments]
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    start = ForkServer._begin
    waiting = [handover]

    def begin(self: ForkServer, descriptor: int, nice: int) -> subprocess.Popen[bytes]:
        if not waiting:
            return start(self, descriptor, nice)
        prepared = waiting.pop()
        words = [str(descriptor), str(nice), str(os.getpid()), *self._command.target]
        place = {"words": words, "options": list(self._command.options), "environment": self.environment}
        socket.send_fds(prepared.connection, [json.dumps(place).encode()], [descriptor])
        prepared.connection.close()
        process = subprocess.Popen.__new__(subprocess.Popen)  # a child like any other, which is already there
        process.args, process.pid, process.returncode = words, prepared.pid, None
        process.stdin = process.stdout = process.stderr = None
        process._waitpid_lock, process._child_created = threading.Lock(), True  # type: ignore[attr-defined]
        return process

    ForkServer._begin = begin  # type: ignore[method-assign]
    return cli.main(arguments)


def _become_fork_server(connection: socket.socket) -> int:
    """Once the launcher says so. Comes back in a worker that has come to its end, by SystemExit."""
    message, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
    connection.detach()  # its number is another file's soon
    if not message:  # the launcher needed none
        os._exit(0)
    from farandole.launch import fork_server_process

    place = json.loads(message)
    os.setsid()
    number = int(place["words"][0])
    keep = os.dup(descriptors[0])
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1, 2):
        os.dup2(nothing, own)
    if keep != number:
        os.dup2(keep, number)
    os.closerange(3, number)
    os.closerange(number + 1, 4096)
    os.environ.clear()
    os.environ.update(place["environment"])
    known = set(sys.path)
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in known]
    script = fork_server_process.__file__
    sys.orig_argv = [sys.executable, *place["options"], script, *place["words"]]
    sys.argv = [script, *place["words"]]
    fork_server_process.main()
    raise AssertionError("a fork server does not return")


# Beside the job -------------------------------------------------------------------------------------------------


def _watch(launcher: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    """To the end of the job, and of what it leaves; what workers ask for meanwhile is done."""
    began, folder = time.monotonic(), Path(asked["folder"])
    helpers: dict[int, Path] = {}
    ended: dict[int, int] = {}
    is_late = False
    while launcher not in ended:
        _reap(ended)
        for request in folder.glob("ask-*"):
            answer = request.with_name(request.name.replace("ask", "answer"))
            size = request.read_text()
            request.unlink()
            helpers[_scale(launcher, size, asked)] = answer
        for pid in [pid for pid in helpers if pid in ended]:
            helpers.pop(pid).write_text(str(ended[pid]))
        if time.monotonic() - began > asked["deadline_s"] and not is_late:
            is_late = True
            _show_stacks(launcher, folder)
            for number in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(launcher, number)
                until = time.monotonic() + 3.0
                while launcher not in ended and time.monotonic() < until:
                    _reap(ended)
                    time.sleep(_POLL_S)
        time.sleep(_POLL_S)
    seconds = time.monotonic() - began
    left = _end_all(ended, known={launcher, *helpers})
    return {"code": ended[launcher], "seconds": round(seconds, 2), "late": is_late, "left": left}


def _reap(ended: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = os.waitstatus_to_exitcode(status)


def _scale(launcher: int, size: str, asked: Mapping[str, Any]) -> int:
    """A `farandole scale` of its own process; its number."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            _leave_server(asked)
            from farandole.launch import cli
            from farandole.launch.job_files import running

            job = next(each.job for each in running() if each.pid == launcher)
            code = cli.main(["scale", size, "--job", job])
        finally:
            os._exit(code)
    return pid


def _show_stacks(launcher: int, folder: Path) -> None:
    for pid in (launcher, *(int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*"))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(_STACKS_S)


def _end_all(ended: dict[int, int], known: set[int]) -> list[str]:
    """Children that are left are orphans of the job: some seconds are theirs to go. Those that stay are killed."""
    until = time.monotonic() + _GONE_S
    while (left := _children()) and time.monotonic() < until:
        _reap(ended)
        time.sleep(_POLL_S)
    words = []
    for pid in left:
        with contextlib.suppress(OSError):
            words.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:200]}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while _children():
        _reap(ended)
        select.select([], [], [], _POLL_S)
    return words


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


if __name__ == "__main__":
    main()
