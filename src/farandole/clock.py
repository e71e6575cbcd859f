"""The only module that reads clocks."""

from __future__ import annotations

import time


def now_s() -> float:
    """Return seconds on the machine's monotonic clock: for deadlines and durations, comparable between processes."""
    return time.monotonic()


def since_boot_s() -> float:
    """Return now_s() plus the time for which the machine was suspended, where the system counts that: for leases."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def now_ns() -> int:
    """Return the time of now_s() in nanoseconds."""
    return time.monotonic_ns()


def wall_time_s() -> float:
    """Return seconds since 1970, for display."""
    return time.time()
