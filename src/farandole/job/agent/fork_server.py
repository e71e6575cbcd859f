"""The agent's handle on its fork server, a process that has imported torch and becomes a worker within milliseconds.
Used by spawner.py.

A server that fails, is killed or does not answer is abandoned, and never harms a worker: the workers that it has forked
are children of the agent, and a worker that was being forked ends by itself unless the agent has sent it its
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from farandole.base.env import is_under_slurm
from farandole.job.agent.fork_server_process import SIZE
from farandole.job.agent.process import Child, adopting_orphans, ignore_announcements, reap_group

_SCRIPT = Path(__file__).with_name("fork_server_process.py")
_FORK_S = 4.0  # milliseconds, unless the machine is busy
_STOP_S = 1.0


class ForkServer:
    """The fork server of an agent, used on one event loop: `start()`, then `fork()` while `is_ready`, and `stop()`
    after start() has ended.

    on_end(reason)  the server cannot be used any more, though it was not stopped
    """

    def __init__(self, command: PythonCommand, environment: Mapping[str, str], on_end: Callable[[str], None]) -> None:
        self.environment = dict(environment)
        self._command, self._on_end = command, on_end
        self._loop = asyncio.get_running_loop()
        self.is_ready = False
        self.settled: asyncio.Future[None] = self._loop.create_future()
        """Completed once the server is ready, or will never be."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_open = False
        self._dropped: list[int] = []  # processes that were forked and abandoned

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id of the server, and of its process group."""
        assert self._process is not None, "call start() first"
        return self._process.pid

    async def start(self, nice: int) -> None:
        """Start to import; `nice` sets the priority of that. Raises OSError. Must not be cancelled."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Not on the loop's thread, which has heartbeats to send: where cores are scarce, a program takes long to
            # start.
            self._process = await asyncio.to_thread(self._begin, theirs.fileno(), nice)
        except OSError:
            self._channel.close()
            self._settle()
            raise
        finally:
            theirs.close()
        self._is_open = True
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._read_status)

    def _begin(self, descriptor: int, nice: int) -> subprocess.Popen[bytes]:
        command = self._command
        arguments = [str(_SCRIPT), str(descriptor), str(nice), str(os.getpid()), *command.target]
        # Before Linux 4.11 the state of this process at the creation of its child counts: has_child_subreaper in
        # kernel/fork.c and kernel/exit.c, find_new_reaper().
        with adopting_orphans():
            return subprocess.Popen(
                [command.python, *command.options, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
                preexec_fn=ignore_announcements if is_under_slurm() else None,
            )

    async def fork(self, environment: Mapping[str, str]) -> Child | None:
        """Return a new worker with this environment; None when the server had to be abandoned."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        worker = _Forked()
        try:
            with adopting_orphans():  # it sends its number when this process is its parent
                socket.send_fds(self._channel, [b"w"], [theirs.fileno()])
                theirs.close()
                async with asyncio.timeout(_FORK_S):
                    await self._give_place(ours, worker, environment)
        except (TimeoutError, OSError) as error:
            worker.close()
            self._drop(worker.pid)
            self._give_up(str(error) or f"it forked no worker within {_FORK_S:g} s")
            return None
        finally:
            ours.close()
            theirs.close()
            worker.close_writing_ends()
        return worker

    async def stop(self) -> None:
        """End the server. The workers that it has forked live on. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self._hang_up()
        process.kill()  # it is idle, so no work is interrupted
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        for group in (process.pid, *self._dropped):
            await reap_group(group)

    async def _give_place(self, connection: socket.socket, worker: _Forked, environment: Mapping[str, str]) -> None:
        data = await self._loop.sock_recv(connection, SIZE.size)
        if len(data) < SIZE.size:
            raise ConnectionError("it could not fork")
        (worker.pid,) = SIZE.unpack(data)
        place = json.dumps(dict(environment)).encode()
        socket.send_fds(connection, [SIZE.pack(len(place))], worker.writing_ends)
        await self._loop.sock_sendall(connection, place)

    def _drop(self, pid: int) -> None:
        """Abandon a forked process. Without an environment it ends by itself; but the last byte of it may just have
        arrived."""
        if pid:
            self._dropped.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _read_status(self) -> None:
        try:
            status = self._channel.recv(1000).decode("utf-8", "replace")
        except BlockingIOError:
            return
        except OSError:
            status = ""
        if status == "ready":
            self.is_ready = True
            self._settle()
        else:
            self._give_up(status or "it was killed, or it failed")

    def _give_up(self, reason: str) -> None:
        if self._is_open and self._process is not None:
            self._hang_up()
            self._process.kill()
            self._on_end(reason)

    def _hang_up(self) -> None:
        if not self._is_open:
            return
        self._is_open = self.is_ready = False
        self._settle()
        self._loop.remove_reader(self._channel)
        self._channel.close()

    def _settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


class _Forked:
    """A Child, once its process number is known."""

    def __init__(self) -> None:
        self.pid = 0
        out, err = os.pipe(), os.pipe()
        self.stdout: IO[bytes] = os.fdopen(out[0], "rb", buffering=0)
        self.stderr: IO[bytes] = os.fdopen(err[0], "rb", buffering=0)
        self.writing_ends = [out[1], err[1]]

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close_writing_ends(self) -> None:
        """Close the writing ends of the pipes: only the worker holds them then."""
        for descriptor in self.writing_ends:
            os.close(descriptor)
        self.writing_ends = []

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


# Commands that a fork server can replace: `python [options] script.py ...`, `python [options] -m module ...` ----------

# Options that mean the same for a server that runs another script first. Not -c, -i, -x and those that only print.
_FLAGS = re.compile(r"-[bBdEIOPqsSuv]+")
_WITH_VALUE = re.compile(r"-[bBdEIOPqsSuv]*[WX]")
_MODULE = re.compile(r"-[bBdEIOPqsSuv]*m")


@dataclass(frozen=True)
class PythonCommand:
    """A Python command. `target` is the part after the interpreter's options: a script, or "-m" and a module; then its
    arguments."""

    python: str
    options: tuple[str, ...]
    target: tuple[str, ...]


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Return None for any other command, as far as its words tell."""
    if not command or not re.fullmatch(r"python[0-9.]*", command[0].rpartition("/")[2]):
        return None
    options, rest = list[str](), list(command[1:])
    while rest:
        argument = rest[0]
        if argument == "--check-hash-based-pycs" or _WITH_VALUE.fullmatch(argument):
            options += rest[:2]
            rest = rest[2:]
        elif _MODULE.fullmatch(argument) and len(rest) > 1:
            flags = argument[:-1]
            return PythonCommand(command[0], (*options, *([flags] if flags != "-" else [])), ("-m", *rest[1:]))
        elif _FLAGS.fullmatch(argument) or (_WITH_VALUE.match(argument) and "importtime" not in argument):
            options.append(rest.pop(0))
        elif argument.endswith(".py") and not argument.startswith("-") and "importtime" not in options:
            return PythonCommand(command[0], tuple(options), tuple(rest))
        else:
            return None
    return None
