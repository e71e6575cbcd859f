"""Where the processes of a job are: on this machine, or on hosts of a lab. By this faults reach them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeAlias

from farandole.testing.faults.fault_plan import OneWay, ToHost
from farandole.testing.lab.cgroups import Cgroup
from farandole.testing.lab.names import new_name
from farandole.testing.lab.tools import LabError

Worker: TypeAlias = tuple[str, int]
"""The name of its host, and its number there."""

_ROOM_BYTES = 32 << 20


class Backend(Protocol):
    def signal(self, worker: Worker, number: int) -> None:
        """Raises ProcessLookupError."""

    def starve(self, worker: Worker) -> bool:
        """Leave a worker almost no memory but what it has; False: that cannot be done here."""

    def disturb(self, action: ToHost | OneWay) -> None:
        """A fault of a host or of the network. Raises ValueError where there are no hosts."""

    def offer(self, slots: int) -> None:
        """There is room for so many workers from now on."""

    def slots_of(self, host: str) -> int:
        """Most workers that can be on a host."""


class ThisMachine:
    """The job is on the machine itself; its host discovery script prints what is in `hosts_file`. Close it."""

    def __init__(self, hosts_file: Path) -> None:
        self.hosts_file = hosts_file
        self._groups: list[Cgroup] = []

    def signal(self, worker: Worker, number: int) -> None:
        os.kill(worker[1], number)

    def starve(self, worker: Worker) -> bool:
        group = starve(worker[1])
        self._groups += [group] if group is not None else []
        return group is not None

    def disturb(self, action: ToHost | OneWay) -> None:
        raise ValueError(f"{str(action)!r} takes a job on hosts of a lab; this one is on the machine itself")

    def offer(self, slots: int) -> None:
        new = self.hosts_file.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n")
        new.rename(self.hosts_file)

    def slots_of(self, host: str) -> int:
        raise ValueError(f"{host} is a host of a lab, and this job is on the machine itself")

    def close(self) -> None:
        for group in self._groups:
            group.remove()
        self._groups.clear()


def starve(pid: int) -> Cgroup | None:
    """Put a process into a control group with little more memory than it has. None where that is not possible."""
    if os.geteuid() != 0:
        return None
    group: Cgroup | None = None
    try:
        group = Cgroup(f"{new_name()}.starved")
        group.limit_memory(_ROOM_BYTES)  # pages that it has already are counted where it took them
        Path(group.memory_entrance or "").write_text(str(pid))
    except (LabError, OSError):
        if group is not None:
            group.remove()
        return None
    return group
