"""What the guard process runs, as a script of its own: only the standard library, no package around it.

Its parent holds the other end of stdin and says "watch GROUP", "release GROUP" or "stop", one a line. When
the stream ends without a "stop" the parent is gone, however it died, and all watched process groups are
killed. Started by guard.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def watched_at_end(lines: Iterable[bytes]) -> set[int]:
    """The process groups that are watched when the stream ends; none after a "stop"."""
    watched: set[int] = set()
    for line in lines:
        command, *group = line.split()
        if command == b"watch":
            watched.add(int(group[0]))
        elif command == b"release":
            watched.discard(int(group[0]))
        else:
            return set()
    return watched


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in watched_at_end(sys.stdin.buffer):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
