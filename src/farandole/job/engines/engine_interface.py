"""The interface of an engine, which runs our agent on the hosts of a job.

An engine decides nothing. The agent dials the coordinator, spawns workers, sends heartbeats and obeys generations; the
engine brings it to its host and observes its end. A HostDiscovery (discovery.py) determines which hosts there are; an
engine may be one, too. fleet.py drives an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from farandole.base.membership import Address
from farandole.errors import FarandoleError


@dataclass(frozen=True)
class AgentOrder:
    """What the agent of one host needs.

    host, slots   its name in the job, and the number of its workers
    coordinators  the addresses at which it may reach the coordinator; it uses the first one that answers
    folder        the working directory of its workers; empty: the path of the job's working directory
    retry_s       seconds for which it tries to join, at the beginning and after it was lost
    interfaces    the network interfaces that it may use for tensors; empty: all, first the one that leads to the
                  coordinator
    preemption    where it looks for preemption notices: the value of its --preemption
    tls           the folder of the job's certificates, which is at the same path on its host; empty: none
    """

    host: str
    slots: int
    coordinators: tuple[Address, ...]
    token: bytes = field(repr=False)
    folder: str = ""
    retry_s: float = 60.0
    interfaces: tuple[str, ...] = ()
    preemption: str = "none"
    tls: str = ""

    def arguments(self) -> list[str]:
        """Return the arguments of `python -m farandole` for this agent. It reads the token, a line, from standard
        input, which must then stay open: its end ends the agent at once."""
        return [
            *("agent", "--join", ",".join(map(str, self.coordinators)), "--host", self.host),
            *("--slots", str(self.slots), "--retry", f"{self.retry_s:g}", "--token-file", "-", "--quiet"),
            *(("--folder", self.folder) if self.folder else ()),
            *(("--network-interfaces", ",".join(self.interfaces)) if self.interfaces else ()),
            *(("--preemption", self.preemption) if self.preemption != "none" else ()),
            *(("--tls", self.tls) if self.tls else ()),
        ]

    def standard_input(self) -> bytes:
        """Return what the agent reads first from its standard input."""
        return self.token + b"\n"


@dataclass(frozen=True)
class AgentExit:
    """The end of an agent.

    reason            for the log; empty: it has served to its end
    is_final          another attempt on this host would fail in the same way
    are_workers_gone  the engine has seen that no process of the agent is left
    """

    reason: str = ""
    is_final: bool = False
    are_workers_gone: bool = True


class RunningAgent(Protocol):
    """The agent of one host that an engine has started."""

    async def wait(self) -> AgentExit:
        """Wait until the agent has ended."""
        ...

    def kill_workers(self) -> None:
        """End the agent's workers at once, and the agent with them where it is a process of its own."""
        ...

    async def close(self) -> None:
        """End the agent if it still runs. Nothing of it is left on this machine when this returns."""
        ...


@dataclass(frozen=True)
class HostReports:
    """Where a HostWatch reports. Unknown agents are ignored.

    leaving  called with an agent that will be taken away soon, and the reason: its workers leave at the next boundary
    gone     called with an agent that is gone, the reason, and whether all its workers are known to be gone, too
    """

    leaving: Callable[[str, str], None]
    gone: Callable[[str, str, bool], None]


class HostWatch(Protocol):
    """Observes hosts on which something else starts the agents. Used on one event loop, which it may not block."""

    async def run(self, reports: HostReports) -> None:
        """Report until it is cancelled. A failure of the observed system may not raise."""
        ...


class StartFailed(FarandoleError):
    """The engine could not start an agent. With `is_final`, another attempt would fail in the same way."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Engine(Protocol):
    """An engine. Used on one event loop, where none of its calls may block."""

    async def start(self, order: AgentOrder) -> RunningAgent:
        """Start the agent of one host. Raises StartFailed."""
        ...

    async def close(self) -> None:
        """Release what the engine holds; its agents are closed already. Idempotent."""
        ...
