"""The factory of coordinators: a process that has imported all that a coordinator needs, and forks one within
milliseconds whenever the launcher asks for it. Used by launch/supervised_coordinator.py.

The launcher forks it before it has threads, sockets or files of its own (`forked_factory`); where that is
too late, or when a factory has died, another one is a program of its own: `python -m
farandole.job.coordinator.coordinator_factory DESCRIPTOR`. A factory has one thread and no descriptor of the job. It
ends with the launcher; its coordinators judge for themselves what the end of the launcher means for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from farandole.base.env import is_under_slurm
from farandole.errors import FarandoleError
from farandole.job.coordinator.coordinator_process import run_coordinator
from farandole.job.coordinator.journal import FORMAT, SOFTWARE, JournalFiles

COORDINATOR_NAME, FACTORY_NAME = "farandole-coord", "coord-factory"
"""The names of the processes in /proc/PID/comm, which `top` and `ps -o comm` show. Their command line is that of the
process from which they were forked."""

_FORK_S = 2.0  # milliseconds, unless the machine is busy or the factory is stopped
_BEGIN_S = 60.0  # of a program that imports everything first

# An answer of the factory: its kind, a process, and an exit code or an error number.
_ANSWER = struct.Struct("=cii")
_FORKED, _ENDED, _FAILED, _CHANGED = b"f", b"e", b"x", b"c"

_RELEASE = f"{SOFTWARE}, format {FORMAT}"


class FactoryLost(FarandoleError):
    """The factory has ended, or does not answer, or cannot fork."""


class SoftwareChanged(FarandoleError):
    """A factory that was started as a program is of another release than the launcher: its coordinators would not
    understand the launcher."""


class ForkedCoordinator:
    """A coordinator's process.

    ended  its exit code, negative for a signal, once it has ended; None: the factory, which alone is told, has died
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if not self.ended.done() or self.ended.result() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class CoordinatorFactory:
    """The launcher's handle on a factory. `fork_coordinator` is for one event loop, and for one caller at a time.

    channel  ends when the factory does
    reap     waits for its process
    limit_s  seconds after which a factory that has not answered is given up
    """

    def __init__(self, pid: int, channel: socket.socket, reap: Callable[[], object], limit_s: float) -> None:
        self.pid = pid
        self._channel, self._reap, self._limit_s = channel, reap, limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer: asyncio.Future[int] | None = None
        self._coordinators: dict[int, ForkedCoordinator] = {}
        self._is_closed = False

    @classmethod
    def executed(cls) -> CoordinatorFactory:
        """Start a factory as a program of its own. Raises FactoryLost."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "farandole.job.coordinator.coordinator_factory"]
            command += [str(theirs.fileno()), _RELEASE]
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            except OSError as error:
                ours.close()
                raise FactoryLost(f"no process can be started: {error.strerror}") from None
        return cls(process.pid, ours, process.wait, _BEGIN_S)

    @classmethod
    def forked(cls) -> CoordinatorFactory:
        """Fork a factory, which is ready at once, from this process, which has one thread. Raises FactoryLost."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # buffered output would be printed by both
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise FactoryLost(f"no process can be forked: {error.strerror}") from None
        if not pid:
            _to_the_end(lambda: _serve(theirs))
        theirs.close()
        return cls(pid, ours, lambda: os.waitpid(pid, 0), _FORK_S)

    async def fork_coordinator(self, link: int, journal: JournalFiles) -> ForkedCoordinator:
        """Return a coordinator that has these descriptors, as run_coordinator takes them. Raises FactoryLost, and
        SoftwareChanged."""
        if self._is_closed:
            raise FactoryLost("it is closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._channel.setblocking(False)
            self._loop.add_reader(self._channel, self._on_answer)
        self._answer = self._loop.create_future()
        try:
            socket.send_fds(self._channel, [b"c"], [link, *journal])
            async with asyncio.timeout(self._limit_s):
                pid = await self._answer
        except TimeoutError:
            raise FactoryLost(
                f"process {self.pid}, which forks coordinators, did not within {self._limit_s:g} s"
            ) from None
        except OSError as error:
            raise FactoryLost(f"process {self.pid}, which forks coordinators, has ended ({error})") from None
        self._limit_s = _FORK_S  # it has imported everything by now
        return self._coordinators[pid]

    def close(self) -> None:
        """End the factory, and not its coordinators. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._channel)
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it is idle, or is stopped
        self._reap()
        for each in self._coordinators.values():
            _set(each.ended, None)

    def _on_answer(self) -> None:
        try:
            data = self._channel.recv(_ANSWER.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if len(data) < _ANSWER.size:
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(ConnectionError("it was killed, or it failed"))
            self.close()
            return
        kind, pid, number = _ANSWER.unpack(data)
        if kind == _ENDED:
            _set(self._coordinators.pop(pid).ended, number)
        elif self._answer is not None and not self._answer.done():
            if kind == _FORKED:
                self._coordinators[pid] = ForkedCoordinator(pid)
                self._answer.set_result(pid)
            elif kind == _CHANGED:
                self._answer.set_exception(
                    SoftwareChanged(f"Farandole was changed on the disk since this launcher, {SOFTWARE}, was started")
                )
            else:
                self._answer.set_exception(OSError(number, os.strerror(number)))


@contextlib.contextmanager
def forked_factory() -> Iterator[CoordinatorFactory | None]:
    """Have a factory inside the block; enter it before this process has threads. None: it cannot be forked; the
    launcher starts one when it needs it, and reports why that fails."""
    factory = None
    if _thread_count() == 1:
        with contextlib.suppress(FactoryLost):
            factory = CoordinatorFactory.forked()
    try:
        yield factory
    finally:
        if factory is not None:
            factory.close()


def _set(future: asyncio.Future[int | None], value: int | None) -> None:
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(value)


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0  # it is not known on this system


# In the factory's process ---------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Be the factory that listens at the descriptor in the first argument, for a launcher of the release in the
    second."""
    _to_the_end(lambda: _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]))


def _serve(channel: socket.socket, release: str = _RELEASE) -> None:
    """Fork a coordinator for each request, and report when one has ended; until the launcher is gone. Signals to the
    process group are for the launcher, which tells coordinators what to do."""
    announcements = (signal.SIGUSR1, signal.SIGUSR2) if is_under_slurm() else ()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *announcements):
        signal.signal(number, signal.SIG_IGN)
    _close_all_but(channel.fileno())
    _allow_descriptors()
    _set_name(FACTORY_NAME)
    gc.freeze()  # a collection in a coordinator would copy all these pages

    def answer(kind: bytes, pid: int, number: int) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            channel.send(_ANSWER.pack(kind, pid, number))

    def report_ended(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                answer(_ENDED, found[0], os.waitstatus_to_exitcode(found[1]))

    signal.signal(signal.SIGCHLD, report_ended)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, 1, 3)
        except ConnectionResetError:  # it was killed before it had read an answer
            return
        if not message:
            return
        if release != _RELEASE:
            answer(_CHANGED, 0, 0)
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # its end is not reported before its beginning
        try:
            pid = os.fork()
        except OSError as error:
            answer(_FAILED, 0, error.errno or 0)
        else:
            if not pid:
                channel.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                _set_name(COORDINATOR_NAME)
                link, *journal = descriptors
                run_coordinator(link, (journal[0], journal[1]))
                return
            answer(_FORKED, pid, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _close_all_but(descriptor: int) -> None:
    """Close what was inherited, except standard output and error, and this one."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    with contextlib.suppress(OSError):  # this system has no such folder; a program of its own has inherited nothing
        for each in map(int, os.listdir("/proc/self/fd")):
            if each > 2 and each != descriptor:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(each)


def _allow_descriptors() -> None:
    """Allow as many open files as the system permits: each agent of a coordinator needs some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_name(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _to_the_end(program: Callable[[], None]) -> NoReturn:
    """Run it, and end this process without what its parent has prepared for its own end."""
    code = 1
    try:
        program()
        code = 0
    except BaseException:  # noqa: BLE001 - where it would end the interpreter
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
