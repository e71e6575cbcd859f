"""Detection of processes that have been stopped for too long (by SIGSTOP). Used by agent.py.

A worker's liveness comes from the kernel, never from its Python code: a worker that computes for minutes, or holds the
interpreter's lock, is alive; a stopped worker will not continue by itself.
"""

from __future__ import annotations

from collections.abc import Mapping


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
