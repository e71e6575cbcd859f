"""The only teller of time."""

from __future__ import annotations

import time


def now_s() -> float:
    """Seconds on the machine's monotonic clock: for deadlines and durations, comparable between processes."""
    return time.monotonic()


def now_ns() -> int:
    """The same clock in nanoseconds."""
    return time.monotonic_ns()


def wall_time_s() -> float:
    """Seconds since 1970: for people."""
    return time.time()
