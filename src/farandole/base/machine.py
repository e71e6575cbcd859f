"""The machine that a process runs on: its cores, its clocks, and the sockets that a forked process must not keep.

No other module reads a clock. The cores of a process are those of its CPU affinity, limited by its control group's CPU
quota. They count where cores are shared among workers, and where a worker decides whether it may spin or compute in the
background.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from weakref import WeakSet

_PROC = Path("/proc/self")


def usable_cores(proc: Path = _PROC) -> int:
    """Return the number of cores that this process may use, at least 1. The control groups in `proc` are read once.

    A quota of 2.5 cores counts as 2: with a third busy thread, all of them would wait for the next period.
    """
    return max(1, min(affinity_cores(), math.floor(_quota_cores(proc))))


def affinity_cores() -> int:
    """Return the number of cores that this process may run on, whatever its control group grants."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache  # it is called in each generation, and takes milliseconds where /proc is slow
def _quota_cores(proc: Path) -> float:
    """Return the lowest CPU quota of the process's control group and its ancestors, in cores. A very large number where
    there is none. Supports both versions of control groups: cgroups(7), "cpu.max" in the kernel's admin-guide/cgroup-v2
    and "cpu.cfs_quota_us" in scheduler/sched-bwc."""
    quotas = [float(1 << 20)]
    with contextlib.suppress(OSError, ValueError):  # not Linux, or hidden by a sandbox: the affinity must suffice
        for folder in _cpu_groups(proc):
            quotas += [_second_version(folder), _first_version(folder)]
    return min(quotas)


def _cpu_groups(proc: Path) -> list[Path]:
    """Return the folders of the process's control groups for CPU time, from the innermost to the outermost visible."""
    paths: dict[str, PurePosixPath] = {}  # by controller; "" is the hierarchy of version 2
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    folders = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mounted_at = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            group = paths.get("")
        elif kind == "cgroup" and "cpu" in options.split(","):
            group = paths.get("cpu")
        else:
            continue
        # A container may see its own group at the mount's root, though its path is given relative to the host's root.
        is_below = group is not None and group.is_relative_to(root)
        inside = group.relative_to(root) if group is not None and is_below else PurePosixPath()
        folders += [Path(mounted_at) / each for each in (inside, *inside.parents)]
    return folders


def _second_version(group: Path) -> float:
    """Return the quota in cores; infinity where there is none."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except OSError:
        return math.inf
    return math.inf if quota == "max" else int(quota) / int(period)


def _first_version(group: Path) -> float:
    """Return the quota in cores; infinity where there is none."""
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except OSError:
        return math.inf
    return math.inf if quota < 0 else quota / period


def may_spin(local_size: int) -> bool:
    """Return whether a worker, one of `local_size` on its host, may wait for the others for a moment without sleeping.
    It may only while no other thread needs the core. To sleep and to be woken costs 10 to 100 us."""
    return usable_cores() >= local_size


@functools.cache
def network_stack() -> str:
    """Return an identifier of this process's network stack; empty where the system has none. Processes with the same
    one reach each other at loopback addresses. It is made of the kernel's boot and of the process's network namespace:
    namespaces(7)."""
    with contextlib.suppress(OSError):  # not Linux, or hidden by a sandbox
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{(_PROC / 'ns/net').stat().st_ino}"
    return ""


# Clocks ---------------------------------------------------------------------------------------------------------------


now_s = time.monotonic
"""Return seconds on the machine's monotonic clock: for deadlines and durations, comparable between processes."""

now_ns = time.monotonic_ns
"""Return the time of now_s() in nanoseconds."""

wall_time_s = time.time
"""Return seconds since 1970, for display."""


def local_time(wall_s: float) -> str:
    """Return the local time of day at `wall_s` seconds since 1970, as hours:minutes:seconds."""
    return time.strftime("%H:%M:%S", time.localtime(wall_s))


def since_boot_s() -> float:
    """Return now_s() plus the time for which the machine was suspended, where the system counts that: for leases."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


# Sockets and forks ----------------------------------------------------------------------------------------------------
#
# Close sockets that a forked child must not keep. Collectives and the control link register theirs here.
#
# A DataLoader worker is a fork of its training process. While it holds copies of the process's sockets, the peers
# cannot detect the death of the process: end-of-file comes only when the last copy is closed. (With two loader
# workers, peers detected it 4 s after a kill -9.)

_sockets: WeakSet[socket.socket] = WeakSet()


def close_at_fork(sock: socket.socket) -> None:
    """Have a forked child close its copy of `sock` before any other code runs in it. Only the child's descriptor is
    closed; the connection of the parent is not affected. Using `sock` in the child raises OSError."""
    _sockets.add(sock)


def _close_in_child() -> None:
    for sock in list(_sockets):
        # Not sock.close(): that keeps the descriptor for as long as a file made from the socket is open.
        descriptor = sock.detach()
        if descriptor >= 0:
            os.close(descriptor)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_close_in_child)


# The software that all workers of a job must share --------------------------------------------------------------------


@functools.cache
def installed_software() -> dict[str, str]:
    """Return the versions of this Python, torch and Farandole, without importing them. A build's suffix, as in
    2.13.0+cpu, is left out."""
    from importlib import metadata  # here: it takes 10 ms, and few processes need it

    versions = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name, distribution in (("torch", "torch"), ("Farandole", "farandole")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(distribution).partition("+")[0]
    return versions


def different_software(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return which version differs, for a message to the user; empty: none does, as far as both are known."""
    for name, version in theirs.items():
        if ours.get(name, version) != version:
            return f"it has {name} {version}, and this job runs with {name} {ours[name]}"
    return ""
