"""The only teller of time."""

from __future__ import annotations

import time


def now_s() -> float:
    """Seconds on the machine's monotonic clock: for deadlines and durations, comparable between processes."""
    return time.monotonic()


def since_boot_s() -> float:
    """As now_s(), but it also counts while the machine is suspended, where the system can tell: for leases."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def now_ns() -> int:
    """The same clock in nanoseconds."""
    return time.monotonic_ns()


def wall_time_s() -> float:
    """Seconds since 1970: for people."""
    return time.time()
