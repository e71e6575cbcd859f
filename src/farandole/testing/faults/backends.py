"""The backends of a job: its processes are on this machine, or on hosts of a lab. Faults reach them through a
backend.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeAlias

from farandole.testing.faults.fault_plan import OneWay, ToHost
from farandole.testing.lab.lab import new_lab_name
from farandole.testing.lab.tools import Cgroup, LabError

WorkerId: TypeAlias = tuple[str, int]
"""A worker: the name of its host, and its process id there."""

_ROOM_BYTES = 32 << 20


class Backend(Protocol):
    def signal(self, worker: WorkerId, number: int) -> None:
        """Send a signal. Raises ProcessLookupError."""

    def starve(self, worker: WorkerId) -> bool:
        """Leave a worker almost no memory beyond its own; False: that is impossible here."""

    def disturb(self, action: ToHost | OneWay) -> None:
        """Cause a fault of a host or of the network. Raises ValueError where there are no hosts."""

    def offer(self, slots: int) -> None:
        """Set the number of slots from now on."""

    def slots_of(self, host: str) -> int:
        """Return the most workers that can be on a host."""


class ThisMachine:
    """The backend of a job on the machine itself; its host discovery script prints the contents of `hosts_file`. Close
    it."""

    def __init__(self, hosts_file: Path) -> None:
        self.hosts_file = hosts_file
        self._groups: list[Cgroup] = []

    def signal(self, worker: WorkerId, number: int) -> None:
        os.kill(worker[1], number)

    def starve(self, worker: WorkerId) -> bool:
        group = starve(worker[1])
        self._groups += [group] if group is not None else []
        return group is not None

    def disturb(self, action: ToHost | OneWay) -> None:
        raise ValueError(f"{str(action)!r} needs a job on hosts of a lab; this job runs on the machine itself")

    def offer(self, slots: int) -> None:
        new = self.hosts_file.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n")
        new.rename(self.hosts_file)

    def slots_of(self, host: str) -> int:
        raise ValueError(f"{host} is a host of a lab, and this job runs on the machine itself")

    def close(self) -> None:
        for group in self._groups:
            group.remove()
        self._groups.clear()


def starve(pid: int) -> Cgroup | None:
    """Put a process into a control group with little more memory than it has. Return None where that is not
    possible."""
    if os.geteuid() != 0:
        return None
    group: Cgroup | None = None
    try:
        group = Cgroup(f"{new_lab_name()}.starved")
        group.limit_memory(_ROOM_BYTES)  # existing pages are counted in the group in which they were allocated
        Path(group.memory_entrance or "").write_text(str(pid))
    except (LabError, OSError):
        if group is not None:
            group.remove()
        return None
    return group
