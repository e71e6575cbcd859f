"""The backends of a job: its processes are on this machine, or on hosts of a lab. Faults reach them through a
backend.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from farandole.testing.faults.fault_plan import HostAction, OneWay, ToHost
from farandole.testing.lab import Host, Lab
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


class _Starving:
    """The control groups of starved workers. Close it."""

    def __init__(self) -> None:
        self._groups: list[Cgroup] = []

    def _starve(self, pid: int) -> bool:
        group = starve(pid)
        self._groups += [group] if group is not None else []
        return group is not None

    def close(self) -> None:
        for group in self._groups:
            group.remove()
        self._groups.clear()


class ThisMachine(_Starving):
    """The backend of a job on the machine itself; its host discovery script prints the contents of `hosts_file`."""

    def __init__(self, hosts_file: Path) -> None:
        super().__init__()
        self.hosts_file = hosts_file

    def signal(self, worker: WorkerId, number: int) -> None:
        os.kill(worker[1], number)

    def starve(self, worker: WorkerId) -> bool:
        return self._starve(worker[1])

    def disturb(self, action: ToHost | OneWay) -> None:
        raise ValueError(f"{str(action)!r} needs a job on hosts of a lab; this job runs on the machine itself")

    def offer(self, slots: int) -> None:
        new = self.hosts_file.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n")
        new.rename(self.hosts_file)

    def slots_of(self, host: str) -> int:
        raise ValueError(f"{host} is a host of a lab, and this job runs on the machine itself")


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


# The backend of a job whose workers are on hosts of a lab: an agent on each, which joined the job; and faults of
# hosts.


_GONE_S = 10.0  # seconds until killed processes are gone, and agents have learned of the end of the job


class LabBackend(_Starving):
    """The backend in a lab. The job listens at `address`, on this machine, and has no workers here.

    slots   of the agent of each host
    folder  for the agents' output and the token; every host sees it
    """

    def __init__(self, lab: Lab, slots: Sequence[int], folder: Path) -> None:
        super().__init__()
        self._lab, self._slots, self._folder = lab, list(slots), folder
        self._hosts = {host.name: host for host in lab.hosts}
        self._token = folder / "token"
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        with socket.create_server((lab.network.driver.address, 0)) as server:
            self.port = int(server.getsockname()[1])

    @property
    def flags(self) -> list[str]:
        """The flags of `farandole run`."""
        address = self._lab.network.driver.address
        return ["--host", address, "--port", str(self.port), "--token-file", str(self._token), "--local-slots", "0"]

    def start_agents(self) -> None:
        """Start agents on all hosts; they wait until the job listens."""
        deadline = time.monotonic() + _GONE_S
        while not self._token.exists():  # the job creates it
            if time.monotonic() > deadline:
                raise TimeoutError("the job did not create its token file")
            time.sleep(0.01)
        for index in range(len(self._lab.hosts)):
            self._start_agent(index)

    # Methods of Backend ----------------------------------------------------------------------------------

    def signal(self, worker: WorkerId, number: int) -> None:
        self._hosts[worker[0]].signal(worker[1], number)

    def starve(self, worker: WorkerId) -> bool:
        outside = self._hosts[worker[0]].processes().get(worker[1])
        if outside is None:
            raise ProcessLookupError(f"there is no worker {worker[1]} on {worker[0]}")
        return self._starve(outside)

    def offer(self, slots: int) -> None:
        raise ValueError(f"the number of slots cannot be set to {slots}: in a lab each host has its own slots")

    def slots_of(self, host: str) -> int:
        return self._slots[self._hosts[host].index]

    def disturb(self, action: ToHost | OneWay) -> None:
        network, hosts = self._lab.network, self._lab.hosts
        if isinstance(action, OneWay):
            network.one_way(hosts[action.sender], hosts[action.receiver])
            return
        host, index = hosts[action.host], action.host
        effects: dict[HostAction, Callable[[], None]] = {
            "power off": host.power_off,
            "boot": lambda: self._boot(index),
            "cut": lambda: network.cut(host),
            "heal": lambda: network.heal(host),
            "freeze": host.freeze,
            "thaw": host.thaw,
            "slow": lambda: network.rate(index, action.amount),
            "lose": lambda: network.loss(index, action.amount / 100),
            "hurry": lambda: self._hurry(index),
            "kill agent of": lambda: self._signal_agent(host, signal.SIGKILL),
            "stop agent of": lambda: self._signal_agent(host, signal.SIGSTOP),
        }
        effects[action.verb]()

    # The end ---------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Return the processes and files that are left on the hosts after the end of the job; they have some seconds to
        end."""
        deadline = time.monotonic() + _GONE_S
        while (found := list(self._left())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _left(self) -> Iterator[str]:
        for host in self._lab.hosts:
            if commands := host.commands():
                yield f"processes were left on {host.name}: {[' '.join(words) for words in commands.values()]}"
            elif host.is_up and (files := host.run(["ls", "/dev/shm"]).split()):
                yield f"files were left in the shared memory of {host.name}: {files}"
            # torch's compiler has its own cache there, for all later programs of the user.
            if files := sorted(p.name for p in host.folder.iterdir() if not p.name.startswith("torchinductor_")):
                yield f"temporary files were left on {host.name}: {files}"

    # Helpers ---------------------------------------------------------------------------------------------

    def _start_agent(self, index: int) -> None:
        host = self._lab.hosts[index]
        arguments = ["--join", f"{self._lab.network.driver.address}:{self.port}", "--slots", str(self._slots[index])]
        arguments += ["--host", host.name, "--token-file", str(self._token), "--verbose"]
        with (self._folder / f"agent-{host.name}").open("ab") as output:
            self._agents[index] = host.start(
                [sys.executable, "-m", "farandole", "agent", *arguments], stdout=output, stderr=subprocess.STDOUT
            )

    def _boot(self, index: int) -> None:
        """Boot the host, if it is off, and start its agent, if it does not run."""
        host = self._lab.hosts[index]
        if not host.is_up:
            host.boot()
        self._signal_agent(host, signal.SIGCONT)
        if self._agents[index].poll() is not None:
            self._start_agent(index)

    def _hurry(self, index: int) -> None:
        self._lab.network.rate(index, None)
        self._lab.network.loss(index, 0)

    def _signal_agent(self, host: Host, number: int) -> None:
        """Send a signal to the agent alone; not to its guard, its workers, or its parent."""
        for pid, words in host.commands().items():
            if words[1:4] == ["-m", "farandole", "agent"]:
                host.signal(pid, number)
