"""The program of the guard process, a separate script: only the standard library, no package around it.

Its arguments: the folder of the job's scratch files; how many seconds of silence mean that the parent is stopped (0: it
may be silent); optionally the descriptor of a connection, and the bytes, in hexadecimal, that are written to it when
the parent is gone. Its parent holds the other end of stdin and writes "watch GROUP", "release GROUP", "heartbeat" or
"stop", one a line. When the stream ends without a "stop" the parent is gone, however it died: all watched process
groups are killed, the bytes are written, and the files that the groups may leave on disk are removed. Started by
guard.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

# Until the kernel has ended them, killed processes might still finish the creation of a file.
_KILLED_S = 0.2
_LOOKS = 25  # at resource trackers, which end by themselves: within milliseconds, where the machine is not busy
_FORKS = 10  # a process that is about to be killed may have forked: look again, but not for ever
_SHARED_MEMORY = Path("/dev/shm")


class WatchedGroups:
    """The watched process groups, and whether the parent has sent "stop"."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.is_over = False
        self._unfinished = b""

    def feed(self, data: bytes) -> None:
        """Process a part of the parent's input."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            command, *group = line.split()
            if command == b"watch":
                self.groups.add(int(group[0]))
            elif command == b"release":
                self.groups.discard(int(group[0]))
            elif command == b"stop":
                self.is_over = True


def follow(stream: int, silence_limit_s: float | None) -> WatchedGroups:
    """Listen until the stream ends; meanwhile kill the watched groups whenever nothing arrived for too long.

    The kernel measures the silence, and looks at the stream before it reports a timeout: data that a slow guard has not
    read yet counts.
    """
    watch, limit_s = WatchedGroups(), silence_limit_s
    while True:
        if not select.select([stream], [], [], limit_s)[0]:
            kill_but_trackers(watch.groups)
            limit_s = None  # once for each silence
            continue
        data = os.read(stream, 1 << 16)
        if not data:
            return watch
        watch.feed(data)
        limit_s = silence_limit_s


def kill(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def kill_but_trackers(groups: Iterable[int]) -> set[int]:
    """Kill the processes of these groups, but for the resource trackers of Python's multiprocessing; return those. A
    tracker ends by itself as soon as nobody else is left, and removes the named semaphores and the blocks of shared
    memory that the others have left in /dev/shm: their names tell nobody else whose they were."""
    killed: set[int] = set()
    for _ in range(_FORKS):
        members = members_of(groups)
        trackers = set(filter(is_resource_tracker, members))
        if not trackers:
            break
        if not (others := members - trackers - killed):
            return trackers
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= others
    kill(groups)
    return set()


def is_resource_tracker(pid: int) -> bool:
    """Return whether this is the process that multiprocessing.resource_tracker starts beside a program. It holds none
    of the program's sockets, and survives SIGINT and SIGTERM."""
    try:
        return b"from multiprocessing.resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended, or there is no such file on this system
        return False


def members_of(groups: Iterable[int], proc: Path = Path("/proc")) -> set[int]:
    """Return the processes of these groups; none where there is no /proc."""
    wanted, found = {str(group).encode() for group in groups}, set()
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            text = stat.read_bytes()
            _state, _parent, group = text[text.rindex(b")") + 2 :].split()[:3]  # the name may contain any character
            if group in wanted:
                found.add(int(stat.parent.name))
    return found


def remove_shared_memory(pids: Iterable[int], folder: Path = _SHARED_MEMORY) -> None:
    """Remove the files in which torch passes tensors between processes (torch_PID_...), of dead processes: a process
    that is killed between the creation and the transfer of such a file leaves it there. A living process may have got a
    dead one's number; its files stay."""
    for pid in filter(_is_dead, pids):
        for path in folder.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _is_dead(pid: int) -> bool:
    """Return whether the process is gone, or dead and waiting for its parent to read its exit code."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return text[text.rindex(b")") + 2 :].startswith((b"Z", b"X"))


def main() -> None:
    # Slurm sends the last two to all processes of a step (sbatch --signal=USR1@90).
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    scratch, silence_limit, *connection = sys.argv[1:]
    watch = follow(sys.stdin.fileno(), float(silence_limit) or None)
    if watch.is_over:
        return
    pids = members_of(watch.groups)
    trackers = kill_but_trackers(watch.groups)
    if connection:
        with contextlib.suppress(OSError):  # the coordinator is gone, too
            os.write(int(connection[0]), bytes.fromhex(connection[1]))
    for _ in range(_LOOKS):
        select.select([], [], [], _KILLED_S)
        if not any(map(is_resource_tracker, trackers)):
            break
    kill(watch.groups)  # a tracker that is kept alive by a process outside the group
    remove_shared_memory(pids)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
