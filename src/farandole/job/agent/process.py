"""The process of a worker: start it, read its output as lines, detect its exit at once, and whether it is stopped; end
it.

A worker is the leader of a session and of a process group of its own. The group is killed the moment the leader has
exited: forked loader processes hold copies of a dead worker's sockets, and its peers would not see the end of their
connections before those are gone too. Only multiprocessing's resource tracker ends by itself: it cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol, cast

from farandole.base.env import is_under_slurm
from farandole.job.agent.guard_process import is_resource_tracker, kill_but_trackers

LAST_LINES = 20
"""Number of the last lines of a worker's stderr that are kept for the report of its exit."""

DRAIN_S = 0.5
"""Seconds after the exit for which the pipes are read: an escaped process can hold them open for ever."""

_TRACKER_S = 1.0  # seconds in which a resource tracker ends by itself: it takes milliseconds
_READ_BYTES = 1 << 16
_READS_AT_EXIT = 16  # a pipe holds 64 KiB; the bound is for an escaped process that never stops writing


class WorkerProcess:
    """A worker's process. Create it on a running event loop, right after the child was started.

    `on_line(stream, line)` gets each line of "stdout" and "stderr", without its end, on the event loop.
    """

    def __init__(self, child: Child, on_line: Callable[[str, bytes], None]) -> None:
        self.pid = child.pid  # of the group's leader, and so also the group's number
        self.children: set[int] = set()  # the process that called init() and its children, as last noted
        self._child, self._on_line = child, on_line
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._last_lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._stdout = _OutputPipe(child.stdout, partial(on_line, "stdout"))
        self._stderr = _OutputPipe(child.stderr, self._on_stderr)
        _watch_exit(child, self._on_exit)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The end of stderr, complete as soon as `wait` has returned."""
        unfinished = self._stderr.unfinished
        lines = [*self._last_lines, unfinished] if unfinished else list(self._last_lines)
        return tuple(line.decode("utf-8", "backslashreplace") for line in lines[-LAST_LINES:])

    async def wait(self) -> int:
        """Return the exit code as subprocess gives it (negative for a signal), once the process is gone and reaped and
        its group was killed. Does not wait for the output of remaining processes: see `wait_for_output`."""
        return await asyncio.shield(self._exit)

    async def wait_for_output(self) -> None:
        """Wait until `on_line` has had its last line, which is DRAIN_S after the exit at the latest."""
        await asyncio.shield(self._stdout.ended)
        await asyncio.shield(self._stderr.ended)

    def note_children(self, worker_pid: int) -> None:
        """Remember the current children of the process that called init(); call it regularly. Once that is dead, they
        cannot be told from others."""
        with contextlib.suppress(OSError):  # it has ended, or there is no such file on this system
            text = Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text()
            self.children = {worker_pid, *map(int, text.split())}

    def terminate(self, grace_s: float, worker_pid: int | None = None) -> None:
        """Ask the worker to end with SIGTERM; kill its group when it still lives after `grace_s` seconds.

        worker_pid  the process that called init(), as reported by its Hello. It alone gets the signal: its loader
                    processes must continue to serve it until it has left, and a shell around it
                    (`bash train.sh`) would neither pass the signal on nor outlive it.
                    None: no process called init(), so there is no job to leave; all processes get it.
        """
        if self._exit.done():
            return
        if grace_s <= 0:
            self.kill()
            return
        if worker_pid is not None and self.has_member(worker_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_pid, signal.SIGTERM)
        else:
            self._signal_group(signal.SIGTERM)
        self._kill_within(grace_s)

    def is_stopped(self, worker_pid: int | None = None) -> bool:
        """Return whether a signal has stopped the process, or `worker_pid`, which is as in `terminate`."""
        return is_stopped(self.pid) or (
            worker_pid is not None and self.has_member(worker_pid) and is_stopped(worker_pid)
        )

    def kill(self) -> None:
        """Send SIGKILL to the whole group; a resource tracker in it has a moment to end by itself. Idempotent."""
        if self._exit.done():
            return
        # All processes of the system are looked through for the group's only where that is needed.
        if not any(map(is_resource_tracker, self.children)):
            self._signal_group(signal.SIGKILL)
        elif trackers := kill_but_trackers([self.pid]):
            self._loop.call_later(_TRACKER_S, self._kill_members, trackers)

    def _on_stderr(self, line: bytes) -> None:
        self._last_lines.append(line)
        self._on_line("stderr", line)

    def _on_exit(self) -> None:
        # The group first: until it is reaped, the leader keeps the group's number from being used again.
        self.kill()
        exit_code = self._child.wait()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        pipes = (self._stdout, self._stderr)
        for pipe in pipes:
            pipe.read_rest()
        self._exit.set_result(exit_code)
        for pipe in pipes:
            self._loop.call_later(DRAIN_S, pipe.close)

    def has_member(self, pid: int) -> bool:
        """Return whether the process belongs to the group of this worker. Numbers of processes are used again."""
        try:
            return os.getpgid(pid) == self.pid
        except ProcessLookupError:
            return False

    def _kill_members(self, pids: set[int]) -> None:
        for pid in filter(self.has_member, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(self.pid, number)

    def _kill_within(self, grace_s: float) -> None:
        if self._kill_timer is not None:
            if self._kill_timer.when() <= self._loop.time() + grace_s:
                return
            self._kill_timer.cancel()
        self._kill_timer = self._loop.call_later(grace_s, self.kill)


class _OutputPipe:
    """The reading end of one output stream."""

    def __init__(self, file: IO[bytes], on_line: Callable[[bytes], None]) -> None:
        self._file, self._on_line = file, on_line
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(file.fileno(), False)
        self._loop.add_reader(file.fileno(), self._read)

    @property
    def unfinished(self) -> bytes:
        return self._splitter.unfinished

    def read_rest(self) -> None:
        """Read the available data, without waiting for more."""
        for _ in range(_READS_AT_EXIT):
            if self.ended.done() or not self._read():
                return

    def close(self) -> None:
        """Pass on the last line and stop listening. Idempotent."""
        if not self.ended.done():
            self._loop.remove_reader(self._file.fileno())
            self._file.close()
            self.ended.set_result(None)
            self._hand_on(self._splitter.end())

    def _read(self) -> bool:
        """Read once; return False when there was no data."""
        try:
            data = os.read(self._file.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._hand_on(self._splitter.feed(data, self._loop.time()))
        return True

    def _hand_on(self, lines: list[bytes]) -> None:
        for line in lines:
            self._on_line(line)


def _watch_exit(child: Child, on_exit: Callable[[], None]) -> None:
    """Call `on_exit` on the event loop once the process has exited; it is not reaped yet where the system allows
    that."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(child.pid)
    except (AttributeError, OSError):  # macOS; Linux before 5.3 (man 2 pidfd_open), or a sandbox that forbids it
        threading.Thread(target=_wait_for_exit, args=(child, loop, on_exit), daemon=True).start()
        return

    def gone() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_exit()

    loop.add_reader(descriptor, gone)


def _wait_for_exit(child: Child, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    else:  # macOS before Python 3.13: the documentation of os.waitid()
        child.wait()
    with contextlib.suppress(RuntimeError):  # the loop was closed before the process ended
        loop.call_soon_threadsafe(on_exit)


# Detection of processes that have been stopped for too long (by SIGSTOP) ----------------------------------------------
#
# A worker's liveness comes from the kernel, never from its Python code: a worker that computes for minutes, or holds
# the interpreter's lock, is alive; a stopped worker will not continue by itself.


class StoppedWatch:
    """Remembers since when each worker has been stopped."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: dict[str, float] = {}

    def look(self, is_worker_stopped: Mapping[str, bool], now_s: float) -> list[str]:
        """Return the workers that were stopped at every look for at least the limit."""
        self._since_s = {
            worker: self._since_s.get(worker, now_s) for worker, is_stopped in is_worker_stopped.items() if is_stopped
        }
        return [worker for worker, since_s in self._since_s.items() if now_s - since_s >= self._limit_s]


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process. False when it is gone, is held by a debugger (which stops it on
    purpose), or the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read()
    except OSError:
        return False
    return fields[fields.rindex(b")") + 2 :].startswith(b"T")  # the name before may contain any character


# The division of bytes into the lines that a terminal would have shown ------------------------------------------------
#
# Progress bars redraw one line again and again with carriage returns. Several workers cannot redraw in place on one
# terminal, so a line that is being redrawn is passed on as a separate line every few seconds, and once more when it
# is complete.

LONGEST_LINE_BYTES = 1 << 18
"""A longer line is passed on in pieces of this size: one line must not fill the agent's memory."""

REDRAW_S = 5.0
"""A line that is redrawn with carriage returns is passed on at most this often before it is complete."""


class LineSplitter:
    """Splits bytes into lines without their ends. The bytes of a line are not changed; text that a carriage return
    (other than one before a newline) overwrites is dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn_s = float("-inf")

    @property
    def unfinished(self) -> bytes:
        """The text so far of the line that has no end yet."""
        return _visible(self._rest)

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that `data` completes, and perhaps one that is being redrawn."""
        *complete, rest = (self._rest + data).split(b"\n")
        lines = [piece for line in complete for piece in _pieces(_visible(line))]
        # The last carriage return may be half of a line's end: only text before one with text after it is overwritten.
        overwritten, carriage_return, _ = rest.rstrip(b"\r").rpartition(b"\r")
        if carriage_return:
            rest = rest[len(overwritten) + 1 :]
            latest = _visible(overwritten)
            if latest.strip() and now_s - self._redrawn_s >= REDRAW_S:
                self._redrawn_s = now_s
                lines += _pieces(latest)
        while len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        self._rest = rest
        return lines

    def end(self) -> list[bytes]:
        """Return the last line at the end of the stream, if that line has no end."""
        unfinished, self._rest = self.unfinished, b""
        return [unfinished] if unfinished else []


def _visible(line: bytes) -> bytes:
    """Return the text that remains of a line on a terminal after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _pieces(line: bytes) -> Iterator[bytes]:
    yield line[:LONGEST_LINE_BYTES]
    for start in range(LONGEST_LINE_BYTES, len(line), LONGEST_LINE_BYTES):
        yield line[start : start + LONGEST_LINE_BYTES]


# The interface of a started process, and the plain way to start one ---------------------------------------------------


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


def start_child(argv: Sequence[str], env: Mapping[str, str]) -> Child:
    """Start a program with exactly this environment. Raises OSError when that is impossible."""
    started = subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=ignore_announcements if is_under_slurm() else None,
    )
    return cast(Child, started)  # it has both pipes


def ignore_announcements() -> None:
    """Let this process, and the programs that it runs, ignore the signals by which Slurm announces the end of a job:
    it sends them to all processes of a step, and the agent handles them."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


# Temporary adoption of orphans: for a moment, orphans of this process's children become its own children.
#
# Only for a moment, because the adopting process has to reap, which is not safe: a process that a worker has put into
# its own session looks like a child that another part of this process (subprocess, asyncio) waits for, and the exit
# code of a child is lost when another part reaps it. So orphans go to their usual parent, unless a worker is just
# being forked.


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h; man 2 PR_SET_CHILD_SUBREAPER
_REAP_S = 2.0
_LOOK_S = 0.01


def can_adopt_orphans() -> bool:
    return _is_on() is not None


class _Adoption:
    """The adoption of orphans, which several may need at once."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._was_on = False  # other code has enabled it, for the whole process

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Adopt the orphans of all threads' children inside the block. May overlap with itself."""
        with self._lock:
            if self._users == 0:
                self._was_on = bool(_is_on())
                _control(_PR_SET_CHILD_SUBREAPER, 1)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and not self._was_on:
                    _control(_PR_SET_CHILD_SUBREAPER, 0)


adopting_orphans = _Adoption()


async def reap_group(pgid: int) -> None:
    """Reap the rest of a group whose leader has been reaped and which was killed: its loader processes may have become
    children of this process. Costs one call when there is none. Gives up on processes that do not end."""
    for _ in range(int(_REAP_S / _LOOK_S)):
        try:
            while os.waitpid(-pgid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(_LOOK_S)


def _is_on() -> bool | None:
    """Return whether it is enabled; None where the system does not support it."""
    if sys.platform != "linux":
        return None
    import ctypes

    value = ctypes.c_int()
    return bool(value.value) if _control(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(value)) else None


def _control(option: int, argument: int) -> bool:
    """Call prctl(2) and return whether it succeeded."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(option, ctypes.c_ulong(argument), *[ctypes.c_ulong(0)] * 3) == 0)
