"""Events of hosts, and the agents on them: they come, go, fail and are excluded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from farandole.events.base import Event, Level, count


@dataclass(frozen=True)
class AgentJoined(Event):
    agent: str
    host: str
    slots: int

    def line(self) -> str:
        return f"agent {self.agent} on {self.host} joined with {count(self.slots, 'slot')}"


@dataclass(frozen=True)
class AgentWasLost(Event):
    agent: str
    reason: str
    workers: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        workers = ", ".join(self.workers) or "none"
        return f"agent {self.agent} is lost with its workers ({workers}): {self.reason}"


@dataclass(frozen=True)
class AgentServes(Event):
    """An agent of another machine reports that it has joined the job."""

    job: str
    slots: int

    def line(self) -> str:
        return f"joined job {self.job} with {count(self.slots, 'slot')}"


@dataclass(frozen=True)
class CoresShared(Event):
    """The workers of this host compute with this number of threads each, since the user has not set one."""

    workers: int
    cores: int
    threads: int

    def line(self) -> str:
        sharing = f"{count(self.workers, 'worker')} may share {count(self.cores, 'core')}"
        return (
            f"{sharing}: each computes with {count(self.threads, 'thread')} (OMP_NUM_THREADS={self.threads}; "
            "set it yourself to change that)"
        )


@dataclass(frozen=True)
class AgentWaits(Event):
    """An agent reports that it cannot join yet."""

    why: str
    retry_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.why}; trying again for {self.retry_s:g} s (--retry)"


@dataclass(frozen=True)
class AgentRejoins(Event):
    """An agent that lost its coordinator reports that its workers are gone, and that it offers its slots again."""

    coordinator: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"joining {self.coordinator} again, without workers: {self.reason}"


@dataclass(frozen=True)
class AgentsAwaited(Event):
    """Agents of other machines may join here; their machine needs a copy of the token file."""

    address: str
    token_file: str

    def line(self) -> str:
        return (
            f"other machines join with: farandole agent --join {self.address} --slots N --token-file FILE "
            f"(a copy of {self.token_file}); connections are authenticated, not encrypted: use a trusted network"
        )


@dataclass(frozen=True)
class CoordinatorLost(Event):
    """An agent without its coordinator ends its workers."""

    agent: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"agent {self.agent} lost the coordinator and ends its workers: {self.reason}"


@dataclass(frozen=True)
class HostAdded(Event):
    """A host was added. `slots` is the number of all its slots; `old_slots` its previous offer, 0 for a new host."""

    host: str
    slots: int
    old_slots: int = 0

    def line(self) -> str:
        if self.old_slots:
            return f"host {self.host} now offers {count(self.slots, 'slot')} instead of {self.old_slots}"
        return f"host {self.host} offers {count(self.slots, 'slot')}"


@dataclass(frozen=True)
class HostRemoved(Event):
    """A host, or a part of it, was withdrawn. `slots` are left: 0 for the whole host. `workers` leave at the next
    boundary."""

    host: str
    slots: int
    workers: tuple[str, ...]

    def line(self) -> str:
        workers = ", ".join(self.workers) or "none"
        what = f"no longer offers more than {count(self.slots, 'slot')}" if self.slots else "is no longer offered"
        return f"host {self.host} {what}; workers that leave: {workers}"


@dataclass(frozen=True)
class HostDrained(Event):
    """A host is drained because of `reason`: no further workers are started there. `workers` leave at the next
    boundary."""

    host: str
    reason: str
    workers: tuple[str, ...]

    def line(self) -> str:
        return f"host {self.host} is drained: {self.reason}; workers that leave: {', '.join(self.workers) or 'none'}"


@dataclass(frozen=True)
class HostUndrained(Event):
    host: str

    def line(self) -> str:
        return f"host {self.host} may be used again"


@dataclass(frozen=True)
class HostRefused(Event):
    """Host discovery named a host that cannot be used; the job continues with the others."""

    host: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"host {self.host} is not used: {self.reason}"


@dataclass(frozen=True)
class HostDiscoveryFailed(Event):
    """Host discovery failed; the job keeps the hosts that it knows."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.reason}; the list of hosts stays unchanged, and discovery is repeated"


@dataclass(frozen=True)
class HostBlacklisted(Event):
    """A worker was lost on the host: no further workers are started there, for `cooldown_s` or for ever (None).
    `workers` were stopped because of it."""

    host: str
    failures: int
    cooldown_s: float | None
    workers: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        how_long = "permanently" if self.cooldown_s is None else f"for {self.cooldown_s:.1f} s"
        stopped = f"; stopping {', '.join(self.workers)}" if self.workers else ""
        return f"host {self.host} is excluded {how_long} after {count(self.failures, 'failure')}{stopped}"


@dataclass(frozen=True)
class HostCooledDown(Event):
    host: str

    def line(self) -> str:
        return f"host {self.host} may be used again: its cool-down is over"
