"""Everything worth logging, one frozen dataclass per kind: for log, status page, metrics and tests alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, TypeAlias

Level: TypeAlias = Literal["info", "warning"]
Field: TypeAlias = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True)
class Event:
    """Base of all events. `level` says how loud, `line()` says it to a person, `fields()` to a program."""

    level: ClassVar[Level] = "info"

    def line(self) -> str:
        """One sentence without a full stop, for the log."""
        raise NotImplementedError

    def fields(self) -> dict[str, Field]:
        """The event's name and values, ready for JSON."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class AgentJoined(Event):
    agent: str
    host: str
    slots: int

    def line(self) -> str:
        return f"agent {self.agent} on {self.host} joined with {_count(self.slots, 'slot')}"


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
class HostAdded(Event):
    """`slots` is the number of all its slots; `old_slots` what it offered before, 0 for a new host."""

    host: str
    slots: int
    old_slots: int = 0

    def line(self) -> str:
        if self.old_slots:
            return f"host {self.host} now offers {_count(self.slots, 'slot')} instead of {self.old_slots}"
        return f"host {self.host} offers {_count(self.slots, 'slot')}"


@dataclass(frozen=True)
class HostRemoved(Event):
    """`slots` are left of it: 0 when the whole host is to be left. `workers` go at the next boundary."""

    host: str
    slots: int
    workers: tuple[str, ...]

    def line(self) -> str:
        workers = ", ".join(self.workers) or "none"
        what = f"no longer offers more than {_count(self.slots, 'slot')}" if self.slots else "is no longer there"
        return f"host {self.host} {what}; workers that leave: {workers}"


@dataclass(frozen=True)
class HostDrained(Event):
    """Nothing is started on the host any more, because of `reason`. `workers` go at the next boundary."""

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
    """Host discovery named a host that cannot be used; the job goes on with the others."""

    host: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"host {self.host} is not used: {self.reason}"


@dataclass(frozen=True)
class HostDiscoveryFailed(Event):
    """Which hosts are there could not be found out; the job keeps those that it knows."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.reason}; the hosts stay what they were, and it is tried again"


@dataclass(frozen=True)
class HostBlacklisted(Event):
    """A worker was lost there: nothing is started on the host any more, for `cooldown_s` or for ever (None).
    `workers` were stopped for it."""

    host: str
    failures: int
    cooldown_s: float | None
    workers: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        how_long = "for good" if self.cooldown_s is None else f"for {self.cooldown_s:.1f} s"
        stopped = f", and {', '.join(self.workers)} with it" if self.workers else ""
        return f"host {self.host} is out {how_long} after {_count(self.failures, 'failure')}{stopped}"


@dataclass(frozen=True)
class HostCooledDown(Event):
    host: str

    def line(self) -> str:
        return f"host {self.host} may be used again: its cool-down is over"


@dataclass(frozen=True)
class WorkerSpawned(Event):
    """`restart` is 0 for the first worker of a slot."""

    worker: str
    slot: int
    host: str
    restart: int
    restarts: int

    def line(self) -> str:
        again = f", restart {self.restart} of {self.restarts}" if self.restart else ""
        return f"starting {self.worker} in slot {self.slot} on {self.host}{again}"


@dataclass(frozen=True)
class ForkServerReady(Event):
    """From now on workers are forked by this process."""

    pid: int

    def line(self) -> str:
        return f"the fork server (process {self.pid}) is ready"


@dataclass(frozen=True)
class ForkServerLost(Event):
    """Workers are started in the plain way until there is another one."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the fork server is lost ({self.reason}); workers are started without it"


@dataclass(frozen=True)
class SpareWaits(Event):
    """A worker has come as far as its elastic function, and is admitted when a member is lost."""

    worker: str
    slot: int
    host: str

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) waits as a spare on {self.host}"


@dataclass(frozen=True)
class SparesMissing(Event):
    """There are no slots for some of the spares that were asked for."""

    spares: int
    missing: int
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        asked = f"{_count(self.spares, 'spare')} (--spares)"
        return f"of {asked} {self.missing} cannot be started: the hosts have no more slots"


@dataclass(frozen=True)
class SlotRests(Event):
    """`failures` workers in a row failed soon after their start: no other one is started there for `pause_s`."""

    slot: int
    host: str
    failures: int
    pause_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"slot {self.slot} on {self.host} sits out for {self.pause_s:g} s: {self.failures} workers in a row "
            "failed there soon after their start"
        )


@dataclass(frozen=True)
class WorkerLost(Event):
    """`last_lines` is the end of the worker's stderr, as far as its agent had it. `restarts_left` of its slot; None
    where no budget counts, because a lost worker costs its host."""

    worker: str
    slot: int
    how: str
    restarts_left: int | None
    last_lines: tuple[str, ...] = ()
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        left = "" if self.restarts_left is None else f"; {_count(self.restarts_left, 'restart')} left for its slot"
        return f"lost {self.worker} (slot {self.slot}): it {self.how}{left}"


@dataclass(frozen=True)
class WorkerEnded(Event):
    """The end of a worker that nobody waits for: it finished, or it left, or it was not needed."""

    worker: str
    slot: int
    how: str

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) {self.how}"


@dataclass(frozen=True)
class UserCodeFailed(Event):
    worker: str
    summary: str
    traceback: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} raised {self.summary}\n{self.traceback}".rstrip()


@dataclass(frozen=True)
class RegroupBegan(Event):
    """A fault ended the running generation; `number` is the one that comes next."""

    number: int
    reason: str
    survivors: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        who = ", ".join(self.survivors) or "nobody"
        return f"regrouping for generation {self.number} with {who}: {self.reason}"


@dataclass(frozen=True)
class ChangePlanned(Event):
    """Members were asked to move to generation `number` at their next boundary."""

    number: int
    reason: str

    def line(self) -> str:
        return f"generation {self.number} is planned: {self.reason}"


@dataclass(frozen=True)
class GenerationStarted(Event):
    """`workers` by rank. `regroup_s`: from the fault or the plan to START; 0 for the first generation."""

    number: int
    workers: tuple[str, ...]
    founding: bool
    regroup_s: float

    def line(self) -> str:
        after = f" after {1000 * self.regroup_s:.0f} ms" if self.regroup_s else ""
        who = f"{_count(len(self.workers), 'worker')}: {', '.join(self.workers)}"
        return f"generation {self.number} starts{after} with {who}"


@dataclass(frozen=True)
class Recovered(Event):
    """All members have applied a step again, after a fault or a planned change; what that took. Milliseconds, one
    after the other; those after START are of `slowest`, the member that took longest.

    lost           members that were lost, and how they ended; `last_lines` of their stderr
    noticed        by what the coordinator knew. When a worker really died nobody knows: the time begins with that
    silent_ms      for how long a host had been silent by then
    ready_ms       until all members were quiescent and START was said
    connected_ms   until the data connections stood
    synced_ms      until the state was everybody's
    first_step_ms  until a step was applied
    """

    number: int
    is_planned: bool
    reason: str
    lost: tuple[str, ...]
    noticed: tuple[str, ...]
    last_lines: tuple[str, ...]
    total_ms: float
    silent_ms: float
    ready_ms: float
    connected_ms: float
    synced_ms: float
    first_step_ms: float
    slowest: str
    steps_redone: int
    samples_redone: int

    def line(self) -> str:
        what = f"from the loss of {', '.join(self.lost)}" if self.lost else f"({self.reason})"
        verb = "changed" if self.is_planned and not self.lost else "recovered"
        phases = [
            *([f"noticed by {' and '.join(self.noticed)}"] if self.noticed else []),
            *([f"silent {self.silent_ms:.0f}"] if self.silent_ms else []),
            f"ready {self.ready_ms:.0f}",
            f"connected {self.connected_ms:.0f}",
            f"synced {self.synced_ms:.0f}",
            f"first step {self.first_step_ms:.0f}",
        ]
        redone = f"; {_count(self.steps_redone, 'step')} redone" if self.steps_redone else ""
        return f"{verb} in {self.total_ms:.0f} ms {what}: {', '.join(phases)}{redone}; slowest {self.slowest}"


@dataclass(frozen=True)
class TransportChosen(Event):
    """`way` says how, to a person; generations that follow have the same unless they say so."""

    number: int
    way: str

    def line(self) -> str:
        return f"in generation {self.number} tensors move {self.way}"


@dataclass(frozen=True)
class TooFewWorkers(Event):
    """Survivors wait, ready to go on, until enough others have come."""

    number: int
    present: int
    min_np: int
    timeout_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"generation {self.number} needs {_count(self.min_np, 'worker')} and has {self.present}; "
            f"waiting for up to {self.timeout_s:g} s (--elastic-timeout)"
        )


@dataclass(frozen=True)
class LinksDistrusted(Event):
    """Connections between living workers kept failing, or were proved to be broken; these workers are stopped to get
    rid of them."""

    number: int
    links: tuple[str, ...]
    workers: tuple[str, ...]
    is_proved: bool = False
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        what = "between living workers are broken" if self.is_proved else "failed again"
        return (
            f"connections {what} in generation {self.number} ({', '.join(self.links)}); "
            f"stopping {', '.join(self.workers)}"
        )


@dataclass(frozen=True)
class WorkerLeaves(Event):
    worker: str
    slot: int

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) was asked to leave and does so at the next boundary"


@dataclass(frozen=True)
class WorkersHung(Event):
    """These have come no further since `step` while all others wait for them; they are stopped."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        who = ", ".join(self.workers)
        return f"{who} held all others up at step {self.step} for {self.stalled_s:.0f} s (--step-timeout): stopped"


@dataclass(frozen=True)
class WorkerStacks(Event):
    """Where the threads of a worker were that was stopped for coming no further."""

    worker: str
    stacks: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the threads of {self.worker} when it was stopped:\n{self.stacks}".rstrip()


@dataclass(frozen=True)
class CollectiveStalled(Event):
    """All members wait for each other since `step`: something between them is broken, or they do different things."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"all {_count(len(self.workers), 'worker')} have waited for each other at step {self.step} for "
            f"{self.stalled_s:.0f} s (--step-timeout)"
        )


@dataclass(frozen=True)
class ScaleChanged(Event):
    old: int
    new: int

    def line(self) -> str:
        return f"the job is asked to go from {self.old} to {_count(self.new, 'worker')}"


@dataclass(frozen=True)
class ScaleRefused(Event):
    size: int
    low: int
    high: int | None
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        limits = f"at least {self.low} (--min-np)"
        if self.high is not None:
            limits += f" and at most {self.high} (--max-np)"
        return f"a job of {self.size} workers was asked for and refused: it must have {limits}"


@dataclass(frozen=True)
class TrainingFinished(Event):
    number: int
    workers: tuple[str, ...]

    def line(self) -> str:
        return f"all {_count(len(self.workers), 'worker')} of generation {self.number} have finished training"


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """The state after `step` decided steps is in the folder `name`, and `worker` took so long to write it."""

    worker: str
    step: int
    name: str
    took_s: float

    def line(self) -> str:
        return f"{self.worker} saved step {self.step} as {self.name} in {self.took_s:.1f} s"


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """Training goes on; earlier checkpoints are untouched, and the next one is tried at its time."""

    worker: str
    step: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} could not save step {self.step}: {self.reason}; earlier checkpoints are untouched"


@dataclass(frozen=True)
class StateLost(Event):
    """No worker that held the state is left. Newcomers go on from the newest checkpoint, in `lineage`."""

    lineage: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"no worker that held the state is left ({self.reason}); going on from the newest checkpoint"


@dataclass(frozen=True)
class JobEnds(Event):
    exit_code: int
    reason: str

    def line(self) -> str:
        return f"the job ends with exit code {self.exit_code}: {self.reason}"


@dataclass(frozen=True)
class ConnectionRefused(Event):
    """Somebody connected and did not say, or prove, what is needed to be served. The job is unharmed."""

    who: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"refused a connection from {self.who}: {self.reason}"


@dataclass(frozen=True)
class JobNotAnnounced(Event):
    """Commands such as `farandole status` will not find the job. It runs all the same."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"farandole status, scale and drain will not find this job: {self.reason}"


@dataclass(frozen=True)
class CoordinatorStalled(Event):
    """The coordinator could not run for a while; its deadlines are put off by as much."""

    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the coordinator could not run for {self.stalled_s:.1f} s; all deadlines are put off by that"


@dataclass(frozen=True)
class CoordinatorLost(Event):
    """An agent without its coordinator ends its workers."""

    agent: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"agent {self.agent} lost the coordinator and ends its workers: {self.reason}"


@dataclass(frozen=True)
class AgentServes(Event):
    """Said by an agent of another machine: it has joined the job."""

    job: str
    slots: int

    def line(self) -> str:
        return f"joined job {self.job} with {_count(self.slots, 'slot')}"


@dataclass(frozen=True)
class AgentWaits(Event):
    """Said by an agent that cannot join yet."""

    why: str
    retry_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.why}; trying again for {self.retry_s:g} s (--retry)"


@dataclass(frozen=True)
class AgentRejoins(Event):
    """Said by an agent that lost its coordinator. Its workers are gone, and it offers its slots again."""

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
            f"(a copy of {self.token_file}); what is said is authentic, not secret: use a network that you trust"
        )


@dataclass(frozen=True)
class StoppedWorkerKilled(Event):
    """A worker was stopped (SIGSTOP) for longer than the detection budget, and was killed for it."""

    worker: str
    budget_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} was stopped by a signal for {self.budget_s:g} s; it is killed"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
