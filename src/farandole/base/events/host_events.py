"""Hosts, and the agents on them: they come, go, fail and are excluded."""

from __future__ import annotations

from farandole.base.events.event import Event, count, named


class AgentJoined(Event):
    """An agent has joined the job, and offers its slots."""

    agent: str
    host: str
    slots: int

    def line(self) -> str:
        return f"agent {self.agent} on {self.host} joined with {count(self.slots, 'slot')}"


class AgentWasLost(Event, level="warning"):
    """An agent is gone, and `workers` are lost with it."""

    agent: str
    reason: str
    workers: tuple[str, ...]

    def line(self) -> str:
        workers = named(self.workers) or "none"
        return f"agent {self.agent} is lost with its workers ({workers}): {self.reason}"


class AgentServes(Event):
    """An agent of another machine reports that it has joined the job."""

    job: str
    slots: int

    def line(self) -> str:
        return f"joined job {self.job} with {count(self.slots, 'slot')}"


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


class AgentWaits(Event, level="warning"):
    """An agent reports that it cannot join yet."""

    sentence = "{why}; trying again for {retry_s:g} s (--retry)"
    why: str
    retry_s: float


class AgentRejoins(Event, level="warning"):
    """An agent that lost its coordinator reports that its workers are gone, and that it offers its slots again."""

    sentence = "joining {coordinator} again, without workers: {reason}"
    coordinator: str
    reason: str


class AgentsAwaited(Event):
    """Agents of other machines may join here. Their machine needs a copy of the token file, or access to the job
    file."""

    address: str
    token_file: str
    job_file: str = ""

    def line(self) -> str:
        if self.job_file:
            how = f"farandole agent --job-file {self.job_file} --slots N"
        else:
            how = f"farandole agent --join {self.address} --slots N --token-file FILE (a copy of {self.token_file})"
        return f"other machines join with: {how}; connections are authenticated, not encrypted: use a trusted network"


class CoordinatorRestarted(Event, level="warning"):
    """The coordinator's process has died; another one takes over from its journal."""

    sentence = "the coordinator (pid {pid}) {how}; another one takes over, and the workers continue"
    pid: int
    how: str


class JobRebuilding(Event, level="warning"):
    """The coordinator's journal is lost. For `within_s` at least, agents may tell of their workers, which continue."""

    sentence = (
        "the state of the job is lost ({reason}); it will be rebuilt from what the agents tell within "
        "{within_s:g} s, and the workers continue"
    )
    reason: str
    within_s: float


class StateUnwritten(Event, level="warning"):
    """The newest state cannot be written to the store of `--state`. The workers train on; decisions wait for it, for
    `patience_s` at most."""

    sentence = (
        "the state of the job cannot be written ({reason}); the workers continue, and decisions about the "
        "job wait for it, for at most {patience_s:g} s"
    )
    reason: str
    patience_s: float


class StateWritten(Event):
    """The newest state could be written again."""

    sentence = "the state of the job was written after {seconds:.1f} s; decisions continue"
    seconds: float


class JobRebuilt(Event, level="warning"):
    """The job was rebuilt from what the agents have told: of these workers, and of all but `missing` members of the
    newest generation. Nobody has told what the job knew besides: counts of failures, drained hosts, a size that was set
    by a command."""

    workers: tuple[str, ...]
    generation: int
    missing: int
    reason: str

    def line(self) -> str:
        missing = f"; {count(self.missing, 'member')} of it told nothing" if self.missing else ""
        return (
            f"the job was rebuilt from what the agents told: {named(self.workers) or 'no worker'} of generation "
            f"{self.generation}{missing}. Counts of failures, drained hosts, and a size that was set by `farandole "
            "scale` are forgotten"
        )


class CoordinatorUnreachable(Event, level="warning"):
    """The connection to the coordinator has ended; the workers continue for up to `patience_s`; None: for any time."""

    agent: str
    reason: str
    patience_s: float | None

    def line(self) -> str:
        limit = f" for up to {self.patience_s:g} s" if self.patience_s is not None else ""
        return f"agent {self.agent} has no connection to the coordinator ({self.reason}); its workers continue{limit}"


class CoordinatorBack(Event):
    """The agent has reached the coordinator again, or another one that has taken over."""

    sentence = "agent {agent} has reached the coordinator again after {after_s:.2f} s"
    agent: str
    after_s: float


class CoordinatorLost(Event, level="warning"):
    """An agent without its coordinator ends its workers."""

    sentence = "agent {agent} lost the coordinator and ends its workers: {reason}"
    agent: str
    reason: str


class HostAdded(Event):
    """A host was added. `slots` is the number of all its slots; `old_slots` its previous offer, 0 for a new host."""

    host: str
    slots: int
    old_slots: int = 0

    def line(self) -> str:
        if self.old_slots:
            return f"host {self.host} now offers {count(self.slots, 'slot')} instead of {self.old_slots}"
        return f"host {self.host} offers {count(self.slots, 'slot')}"


class HostRemoved(Event):
    """A host, or a part of it, was withdrawn. `slots` are left: 0 for the whole host. `workers` leave at the next
    boundary."""

    host: str
    slots: int
    workers: tuple[str, ...]

    def line(self) -> str:
        workers = named(self.workers) or "none"
        what = f"no longer offers more than {count(self.slots, 'slot')}" if self.slots else "is no longer offered"
        return f"host {self.host} {what}; workers that leave: {workers}"


class HostDrained(Event):
    """A host is drained because of `reason`: no further workers are started there. `workers` leave at the next
    boundary."""

    host: str
    reason: str
    workers: tuple[str, ...]

    def line(self) -> str:
        return f"host {self.host} is drained: {self.reason}; workers that leave: {named(self.workers) or 'none'}"


class HostUndrained(Event):
    """A drained host may be used again, by a user's request."""

    sentence = "host {host} may be used again"
    host: str


class HostRefused(Event, level="warning"):
    """Host discovery named a host that cannot be used; the job continues with the others."""

    sentence = "host {host} is not used: {reason}"
    host: str
    reason: str


class HostDiscoveryFailed(Event, level="warning"):
    """Host discovery failed; the job keeps the hosts that it knows."""

    sentence = "{reason}; the list of hosts stays unchanged, and discovery is repeated"
    reason: str


class AgentNotStarted(Event, level="warning"):
    """The agent of a host could not be started, or has ended too early. It is started again after `again_s`."""

    sentence = "host {host} has no agent: {reason}; another attempt follows in {again_s:.1f} s"
    host: str
    reason: str
    again_s: float


class AgentPrinted(Event, level="warning"):
    """The agent of a host has printed a line."""

    sentence = "host {host}: {text}"
    host: str
    text: str


class PreemptionWatched(Event):
    """The metadata service of a cloud is asked whether this machine will be taken away."""

    sentence = "preemption notices of {cloud} are watched (--preemption)"
    cloud: str


class PreemptionUnwatched(Event, level="warning"):
    """Preemption notices cannot be received, for the moment or at all."""

    reason: str
    is_tried_again: bool

    def line(self) -> str:
        again = "; trying again" if self.is_tried_again else ""
        return f"no preemption notices can be received: {self.reason}{again}"


class PreemptionAnnounced(Event, level="warning"):
    """The cloud announces that this machine will be taken away (`must_leave`), or only that it may be."""

    reason: str
    must_leave: bool

    def line(self) -> str:
        return self.reason if self.must_leave else f"{self.reason}; training goes on here"


class PodsNotWatched(Event, level="warning"):
    """The coordinator cannot see the pods of the job. Deaths are still detected by the agents' heartbeats."""

    sentence = "the pods of the job cannot be watched: {reason}; the job goes on, and this is tried again"
    reason: str


class HostBlacklisted(Event, level="warning"):
    """A worker was lost on the host: no further workers are started there, for `cooldown_s` or for ever (None).
    `workers` were stopped because of it."""

    host: str
    failures: int
    cooldown_s: float | None
    workers: tuple[str, ...]

    def line(self) -> str:
        how_long = "permanently" if self.cooldown_s is None else f"for {self.cooldown_s:.1f} s"
        stopped = f"; stopping {named(self.workers)}" if self.workers else ""
        return f"host {self.host} is excluded {how_long} after {count(self.failures, 'failure')}{stopped}"


class HostCooledDown(Event):
    """The time is over for which a host was excluded."""

    sentence = "host {host} may be used again: its cool-down is over"
    host: str
