"""The backends of a job: its processes are on this machine, or on hosts of a lab. Faults reach them through a
backend.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from farandole.testing.faults.fault_plan import OneWay, ToHost
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


# The backend of a job whose workers are on hosts of a lab: an agent on each, which joined the job; and faults of
# hosts.


_GONE_S = 10.0  # seconds until killed processes are gone, and agents have learned of the end of the job


class LabBackend:
    """The backend in a lab. The job listens at `address`, on this machine, and has no workers here.

    slots   of the agent of each host
    folder  for the agents' output and the token; every host sees it
    """

    def __init__(self, lab: Lab, slots: Sequence[int], folder: Path) -> None:
        self._lab, self._slots, self._folder = lab, list(slots), folder
        self._hosts = {host.name: host for host in lab.hosts}
        self._token = folder / "token"
        self._groups: list[Cgroup] = []
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
        group = starve(outside)
        self._groups += [group] if group is not None else []
        return group is not None

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
        if action.verb == "power off":
            host.power_off()
        elif action.verb == "boot":
            self._boot(index)
        elif action.verb == "cut":
            network.cut(host)
        elif action.verb == "heal":
            network.heal(host)
        elif action.verb == "freeze":
            host.freeze()
        elif action.verb == "thaw":
            host.thaw()
        elif action.verb == "slow":
            network.rate(index, action.amount)
        elif action.verb == "lose":
            network.loss(index, action.amount / 100)
        elif action.verb == "hurry":
            network.rate(index, None)
            network.loss(index, 0)
        else:
            number = signal.SIGKILL if action.verb == "kill agent of" else signal.SIGSTOP
            for pid in self._agent_pids(host):
                host.signal(pid, number)

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
            if numbers := host.processes():
                yield f"processes were left on {host.name}: {[_command(pid) for pid in numbers.values()]}"
            elif host.is_up and (files := host.run(["ls", "/dev/shm"]).split()):
                yield f"files were left in the shared memory of {host.name}: {files}"
            # torch's compiler has its own cache there, for all later programs of the user.
            if files := sorted(p.name for p in host.folder.iterdir() if not p.name.startswith("torchinductor_")):
                yield f"temporary files were left on {host.name}: {files}"

    def close(self) -> None:
        for group in self._groups:
            group.remove()
        self._groups.clear()

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
        for pid in self._agent_pids(host):
            host.signal(pid, signal.SIGCONT)
        if self._agents[index].poll() is not None:
            self._start_agent(index)

    def _agent_pids(self, host: Host) -> list[int]:
        """Return the process ids of the agent alone; not of its guard, its workers, or its parent."""
        found = []
        for pid, outside in host.processes().items():
            arguments = _command(outside).split()
            if arguments[1:4] == ["-m", "farandole", "agent"]:
                found.append(pid)
        return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
