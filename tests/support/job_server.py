"""Starts `farandole ...` in milliseconds: this process has imported torch, and forks the launcher and its fork servers.
A script that runs on its own, without a launcher, takes the launcher's place.
Started by launching.py, as `python -m tests.support.job_server DESCRIPTOR`.

The launcher, the agents, the guard and the workers are those of a real job; only the imports are done beforehand. Each
job has a keeper, a process forked from this one that is the launcher's parent. Orphans of the job become children of
its keeper, so that whatever a job leaves behind is seen.

    job server -> keeper -> launcher -> nursery -> fork server -> workers
                  one for each job      |          children of the launcher, as in any job
                                        forks one whenever the launcher wants it

The client sends one end of a new connection for each job, and the descriptors of its standard output and error. The
keeper reads a line of JSON there, {"program", "arguments", "environment", "folder", "gone_s"}, and writes three, as
things happen: {"pid"} of the launcher, {"code"} that it ended with, {"left"}: what was left behind, which has been
killed.
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
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_POLL_MS = 5
_NO_PLACE = 1  # exit code of a fork server whose launcher is gone


def main() -> None:
    """Serve until the client is gone."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    gc.collect()
    gc.freeze()
    channel.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 3)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            connection, output, error = descriptors
            _keep(socket.socket(fileno=connection), output, error)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap({})


def _import_all() -> None:
    from farandole.job.agent.fork_server_process import PRELOADED

    launcher = (
        "asyncio",
        "farandole.job.launch.launcher",
        "farandole.job.coordinator.coordinator_factory",
        "farandole.job.launch.control_commands",
        "farandole.integrations.horovod",
    )
    for name in (*PRELOADED, *launcher, "torch.optim.swa_utils", "torch.nn.parallel", "torch.utils.data"):
        module = importlib.import_module(name)
        if name in PRELOADED and name.startswith("farandole"):
            for each in getattr(module, "__all__", ()):
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
    except BaseException:  # noqa: BLE001 - where it would end the interpreter
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _reap(ended: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = os.waitstatus_to_exitcode(status)


# The keeper of a job ---------------------------------------------------------------------------------------------


def _keep(connection: socket.socket, output: int, error: int) -> NoReturn:
    """Start the launcher and see it to its end, and then what it leaves. A client that goes away ends the job."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with connection.makefile("r") as lines:
        asked = json.loads(lines.readline())
    if (launcher := os.fork()) == 0:
        connection.close()
        _be_launcher(asked, output, error)
    os.close(output)
    os.close(error)
    _say(connection, {"pid": launcher})
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    ended: dict[int, int] = {}
    while launcher not in ended:
        if poll.poll(_POLL_MS):
            os.kill(launcher, signal.SIGKILL)
            poll.unregister(connection)
        _reap(ended)
    _say(connection, {"code": ended[launcher]})
    _say(connection, {"left": _end_orphans(asked["gone_s"])})
    os._exit(0)


def _say(connection: socket.socket, words: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the client is gone
        connection.sendall(json.dumps(words).encode() + b"\n")


def _end_orphans(gone_s: float) -> list[str]:
    """Children that are left are orphans of the job: so many seconds are theirs to go. Those that stay are killed, and
    what they leave as well; the result says which."""
    until = time.monotonic() + gone_s
    while _children() and time.monotonic() < until:
        _reap({})
        select.select([], [], [], _POLL_MS / 1000)
    words: dict[int, str] = {}
    while left := _children():
        for pid in left:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode()
                words.setdefault(pid, f"{pid}: {line[:200]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap({})
        select.select([], [], [], _POLL_MS / 1000)
    return list(words.values())


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


# The launcher and its fork servers -------------------------------------------------------------------------------


def _be_launcher(asked: Mapping[str, Any], output: int, error: int) -> NoReturn:
    """A process of its own, with the output, environment and folder of the job."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, descriptor in enumerate((nothing, output, error)):
        os.dup2(descriptor, own)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None  # an import may have asked for it
    os.chdir(asked["folder"])
    if asked["program"] == "python":
        _end_quickly(_run_script, asked["arguments"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setsid()  # no signal to the launcher's process group is for it
        _nurse(theirs, os.getppid())
    theirs.close()
    _end_quickly(_launch, asked["program"], asked["arguments"], ours)


def _launch(program: str, arguments: Sequence[str], nursery: socket.socket) -> int:
    from farandole.integrations.horovod import horovodrun
    from farandole.job.agent import agent
    from farandole.job.agent.fork_server import ForkServer
    from farandole.job.agent.process import adopting_orphans
    from farandole.job.agent.spawner import make_spawner
    from farandole.job.launch import cli

    sys.argv = [program, *arguments]
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    one_at_a_time = threading.Lock()

    def fork(place: Mapping[str, Any], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        with one_at_a_time, adopting_orphans():
            socket.send_fds(nursery, [json.dumps(place).encode()], descriptors)
            pid = int(nursery.recv(100))
        process = subprocess.Popen.__new__(subprocess.Popen)  # a child like any other, which is already there
        process.args, process.pid, process.returncode = place["words"], pid, None
        process.stdin = process.stdout = process.stderr = None
        process._waitpid_lock, process._child_created = threading.Lock(), True  # type: ignore[attr-defined]
        return process

    def begin(self: ForkServer, descriptor: int, nice: int) -> subprocess.Popen[bytes]:
        words = [str(descriptor), str(nice), str(os.getpid()), *self._command.target]
        place = {"words": words, "options": list(self._command.options), "environment": self.environment}
        return fork(place, [descriptor])

    ForkServer._begin = begin  # type: ignore[method-assign]
    if not any(word in ("--fork-server", "--no-fork-server") for word in arguments):
        agent.make_spawner = lambda use, *rest: make_spawner("on", *rest)  # the first workers as well
    return {"farandole": cli.main, "horovodrun": horovodrun.main}[program](arguments)


def _run_script(words: Sequence[str]) -> int:
    """Do what `python SCRIPT ...` does."""
    script, *_ = sys.argv = [*words]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    return 0


def _nurse(connection: socket.socket, launcher: int) -> NoReturn:
    """Fork a process whenever the launcher asks for one, which adopts it; until the launcher is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        if between := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(between, 0)
            continue
        if os.fork():
            os._exit(0)
        while os.getppid() != launcher:
            if not Path(f"/proc/{launcher}").exists():
                os._exit(_NO_PLACE)
            select.select([], [], [], 0.0005)
        place = json.loads(message)
        connection.send(str(os.getpid()).encode())
        connection.close()
        _end_quickly(_be_fork_server, place, descriptors[0])


def _be_fork_server(place: Mapping[str, Any], descriptor: int) -> int:
    """Comes back in a worker that has come to its end, by SystemExit."""
    from farandole.job.agent import fork_server_process

    os.setsid()
    number = int(place["words"][0])
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in (0, 1, 2):
        os.dup2(nothing, own)
    if descriptor != number:
        os.dup2(descriptor, number)
    os.closerange(3, number)
    os.closerange(number + 1, 4096)
    os.environ.clear()
    os.environ.update(place["environment"])
    tempfile.tempdir = None
    known = set(sys.path)
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in known]
    script = fork_server_process.__file__
    sys.orig_argv = [sys.executable, *place["options"], script, *place["words"]]
    sys.argv = [script, *place["words"]]
    fork_server_process.main()
    raise AssertionError("a fork server does not return")


if __name__ == "__main__":
    main()
