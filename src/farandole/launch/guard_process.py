"""What the guard process runs, as a script of its own: only the standard library, no package around it.

Its arguments: the folder of the job's scratch files. Its parent holds the other end of stdin and says "watch
GROUP", "release GROUP" or "stop", one a line. When the stream ends without a "stop" the parent is gone, however
it died: all watched process groups are killed, and what they may leave on disk is removed. Started by guard.py.
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

# Until the kernel has ended them, killed processes might still finish what they were just creating.
_KILLED_S = 0.2
_SHARED_MEMORY = Path("/dev/shm")


def watched_at_end(lines: Iterable[bytes]) -> set[int] | None:
    """The process groups that are watched when the stream ends; None after a "stop"."""
    watched: set[int] = set()
    for line in lines:
        command, *group = line.split()
        if command == b"watch":
            watched.add(int(group[0]))
        elif command == b"release":
            watched.discard(int(group[0]))
        else:
            return None
    return watched


def members_of(groups: Iterable[int], proc: Path = Path("/proc")) -> set[int]:
    """The processes of these groups; none where there is no /proc."""
    wanted, found = {str(group).encode() for group in groups}, set()
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            text = stat.read_bytes()
            _state, _parent, group = text[text.rindex(b")") + 2 :].split()[:3]  # the name may hold anything
            if group in wanted:
                found.add(int(stat.parent.name))
    return found


def remove_shared_memory(pids: Iterable[int], folder: Path = _SHARED_MEMORY) -> None:
    """Remove the files in which torch passes tensors between processes (torch_PID_...), of dead processes: one
    that is killed between making such a file and handing it over leaves it there. A living process may have come
    by a dead one's number; its files stay."""
    for pid in filter(_is_dead, pids):
        for path in folder.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _is_dead(pid: int) -> bool:
    """Gone, or dead and waiting for its parent to ask for its exit code."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return text[text.rindex(b")") + 2 :].startswith((b"Z", b"X"))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = watched_at_end(sys.stdin.buffer)
    if groups is None:
        return
    pids = members_of(groups)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    select.select([], [], [], _KILLED_S)
    remove_shared_memory(pids)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
