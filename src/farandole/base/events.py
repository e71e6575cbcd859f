"""The events of a job, one frozen dataclass per kind: for log, status page, metrics and tests alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, TypeAlias

from farandole.base.membership import Shortfall

Level: TypeAlias = Literal["info", "warning"]
Field: TypeAlias = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True)
class Event:
    """Base of all events. `level` is the log level, `line()` the text for people, `fields()` the values for
    programs."""

    level: ClassVar[Level] = "info"

    def line(self) -> str:
        """Return one sentence without a full stop, for the log."""
        raise NotImplementedError

    def fields(self) -> dict[str, Field]:
        """Return the event's name and values, ready for JSON."""
        return {"event": type(self).__name__, **asdict(self)}


def count(number: int, noun: str) -> str:
    """Format a count: `1 slot`, `2 slots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


MOST_NAMED = 16


def named(names: Sequence[str]) -> str:
    """Join names for a line. A line of a large job has the first ones, and the number of the others."""
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    first = names[: MOST_NAMED // 2]
    return f"{', '.join(first)} and {len(names) - len(first)} others"


# Hosts, and the agents on them: they come, go, fail and are excluded --------------------------------------------------


@dataclass(frozen=True)
class AgentJoined(Event):
    """An agent has joined the job, and offers its slots."""

    agent: str
    host: str
    slots: int

    def line(self) -> str:
        return f"agent {self.agent} on {self.host} joined with {count(self.slots, 'slot')}"


@dataclass(frozen=True)
class AgentWasLost(Event):
    """An agent is gone, and `workers` are lost with it."""

    agent: str
    reason: str
    workers: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        workers = named(self.workers) or "none"
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


@dataclass(frozen=True)
class CoordinatorRestarted(Event):
    """The coordinator's process has died; another one takes over from its journal."""

    pid: int
    how: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the coordinator (pid {self.pid}) {self.how}; another one takes over, and the workers continue"


@dataclass(frozen=True)
class JobRebuilding(Event):
    """The coordinator's journal is lost. For `within_s` at least, agents may tell of their workers, which continue."""

    reason: str
    within_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"the state of the job is lost ({self.reason}); it will be rebuilt from what the agents tell within "
            f"{self.within_s:g} s, and the workers continue"
        )


@dataclass(frozen=True)
class StateUnwritten(Event):
    """The newest state cannot be written to the store of `--state`. The workers train on; decisions wait for it, for
    `patience_s` at most."""

    reason: str
    patience_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"the state of the job cannot be written ({self.reason}); the workers continue, and decisions about the "
            f"job wait for it, for at most {self.patience_s:g} s"
        )


@dataclass(frozen=True)
class StateWritten(Event):
    """The newest state could be written again."""

    seconds: float

    def line(self) -> str:
        return f"the state of the job was written after {self.seconds:.1f} s; decisions continue"


@dataclass(frozen=True)
class JobRebuilt(Event):
    """The job was rebuilt from what the agents have told: of these workers, and of all but `missing` members of the
    newest generation. Nobody has told what the job knew besides: counts of failures, drained hosts, a size that was set
    by a command."""

    workers: tuple[str, ...]
    generation: int
    missing: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        missing = f"; {count(self.missing, 'member')} of it told nothing" if self.missing else ""
        return (
            f"the job was rebuilt from what the agents told: {named(self.workers) or 'no worker'} of generation "
            f"{self.generation}{missing}. Counts of failures, drained hosts, and a size that was set by `farandole "
            "scale` are forgotten"
        )


@dataclass(frozen=True)
class CoordinatorUnreachable(Event):
    """The connection to the coordinator has ended; the workers continue for up to `patience_s`; None: for any time."""

    agent: str
    reason: str
    patience_s: float | None
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        limit = f" for up to {self.patience_s:g} s" if self.patience_s is not None else ""
        return f"agent {self.agent} has no connection to the coordinator ({self.reason}); its workers continue{limit}"


@dataclass(frozen=True)
class CoordinatorBack(Event):
    """The agent has reached the coordinator again, or another one that has taken over."""

    agent: str
    after_s: float

    def line(self) -> str:
        return f"agent {self.agent} has reached the coordinator again after {self.after_s:.2f} s"


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
        workers = named(self.workers) or "none"
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
        return f"host {self.host} is drained: {self.reason}; workers that leave: {named(self.workers) or 'none'}"


@dataclass(frozen=True)
class HostUndrained(Event):
    """A drained host may be used again, by a user's request."""

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
class AgentNotStarted(Event):
    """The agent of a host could not be started, or has ended too early. It is started again after `again_s`."""

    host: str
    reason: str
    again_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"host {self.host} has no agent: {self.reason}; another attempt follows in {self.again_s:.1f} s"


@dataclass(frozen=True)
class AgentPrinted(Event):
    """The agent of a host has printed a line."""

    host: str
    text: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"host {self.host}: {self.text}"


@dataclass(frozen=True)
class PreemptionWatched(Event):
    """The metadata service of a cloud is asked whether this machine will be taken away."""

    cloud: str

    def line(self) -> str:
        return f"preemption notices of {self.cloud} are watched (--preemption)"


@dataclass(frozen=True)
class PreemptionUnwatched(Event):
    """Preemption notices cannot be received, for the moment or at all."""

    reason: str
    is_tried_again: bool
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        again = "; trying again" if self.is_tried_again else ""
        return f"no preemption notices can be received: {self.reason}{again}"


@dataclass(frozen=True)
class PreemptionAnnounced(Event):
    """The cloud announces that this machine will be taken away (`must_leave`), or only that it may be."""

    reason: str
    must_leave: bool
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return self.reason if self.must_leave else f"{self.reason}; training goes on here"


@dataclass(frozen=True)
class PodsNotWatched(Event):
    """The coordinator cannot see the pods of the job. Deaths are still detected by the agents' heartbeats."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the pods of the job cannot be watched: {self.reason}; the job goes on, and this is tried again"


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
        stopped = f"; stopping {named(self.workers)}" if self.workers else ""
        return f"host {self.host} is excluded {how_long} after {count(self.failures, 'failure')}{stopped}"


@dataclass(frozen=True)
class HostCooledDown(Event):
    """The time is over for which a host was excluded."""

    host: str

    def line(self) -> str:
        return f"host {self.host} may be used again: its cool-down is over"


# The job as a whole: its size, its checkpoints, its end, and its connections ------------------------------------------


@dataclass(frozen=True)
class ScaleChanged(Event):
    """The job has another target size, by a user's request: `old` and `new` workers."""

    old: int
    new: int

    def line(self) -> str:
        return f"the target size of the job changes from {self.old} to {count(self.new, 'worker')}"


@dataclass(frozen=True)
class ScaleRefused(Event):
    """A request for `size` workers is outside of the limits `low` and `high`; None: no limit."""

    size: int
    low: int
    high: int | None
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        limits = f"at least {self.low} (--min-np)"
        if self.high is not None:
            limits += f" and at most {self.high} (--max-np)"
        return f"the requested size of {self.size} workers was refused: the job must have {limits}"


@dataclass(frozen=True)
class TrainingFinished(Event):
    """The elastic function has returned on all workers of generation `number`."""

    number: int
    workers: tuple[str, ...]

    def line(self) -> str:
        return f"all {count(len(self.workers), 'worker')} of generation {self.number} have finished training"


@dataclass(frozen=True)
class JobBecameStatic(Event):
    """The script does something that cannot follow the membership. All workers have left the elastic function, in the
    middle of the script, and train on as a static job."""

    number: int
    workers: tuple[str, ...]
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"{self.reason}; this job is static from here on, with {count(len(self.workers), 'worker')}: when a worker "
            f"is lost, the job ends, or starts again as a whole with --max-restarts"
        )


@dataclass(frozen=True)
class TrainingCutShort(Event):
    """The elastic function returned before all was done that epochs(total), or a framework's trainer, had promised.

    The script may have intended that (`break`, early stopping) or not: only its author can tell. Fields as in Shortfall
    (membership.py); all are 0 when no worker has returned from the function: what was left is not known then.
    """

    epochs: int = 0
    epochs_left: int = 0
    steps: int = 0
    steps_left: int = 0
    level: ClassVar[Level] = "warning"

    @classmethod
    def of(cls, left: Shortfall) -> TrainingCutShort:
        return cls(left.epochs, left.epochs_left, left.steps, left.steps_left)

    def line(self) -> str:
        counts = []
        if self.steps:
            counts.append(f"{self.steps_left} of {count(self.steps, 'step')} were not applied")
        if self.epochs:
            counts.append(f"{self.epochs_left} of {count(self.epochs, 'epoch')} ended early or were not started")
        told = "; ".join(counts) or "it has left the elastic function before this returned"
        return f"the script has ended the training itself: {told}"

    def verdict(self) -> str:
        """Return what the last line of the job says of it."""
        if self.steps:
            return f"ended by the script after {self.steps - self.steps_left} of {count(self.steps, 'step')}"
        if not self.epochs:
            return "ended by the script"
        whole = self.epochs - self.epochs_left
        return f"ended by the script after {whole} of {count(self.epochs, 'whole epoch')}"


@dataclass(frozen=True)
class JobRemarked(Event):
    """Something that the result of the training needs to be read with: what was skipped, not trained, or not compared.
    It stands in the last line of the job; a later one of the same topic replaces it."""

    topic: str
    text: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"remark: {self.text}"


@dataclass(frozen=True)
class NumberOfWorkersFixed(Event):
    """What a job trains depends on the number of its workers: it waits for the replacement of each lost one."""

    workers: int
    because: str
    level: ClassVar[Level] = "info"

    def line(self) -> str:
        return f"each step needs {count(self.workers, 'worker')}, so lost ones are waited for: {self.because}"


@dataclass(frozen=True)
class NumberOfWorkersFreed(Event):
    """A lost worker of a job with a fixed number of workers cannot be replaced: the job goes on without it."""

    workers: int
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"there will be no {count(self.workers, 'worker')} again (no restarts, slots or time left to wait for a "
            f"replacement): the job goes on with fewer"
        )


@dataclass(frozen=True)
class WorkerTrainsAlone(Event):
    """A worker has made a step of an optimizer, and has not met the others: neither in init(), nor in a process group
    of torch.distributed. They may have trained as many models as there are workers."""

    worker: str
    workers: int
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"{self.worker} trains alone: it has made an optimizer step and has not met the others of "
            f"{count(self.workers, 'worker')}; call init(), or torch.distributed.init_process_group() as under "
            "torchrun, or start the script with -np 1"
        )


@dataclass(frozen=True)
class WorkerMetOthers(Event):
    """A worker of which it was said that it trains alone has met the others: the steps before were its own."""

    worker: str

    def line(self) -> str:
        return f"{self.worker} has met the other workers now: it does not train alone"


@dataclass(frozen=True)
class WorkersNeverMet(Event):
    """Workers have ended with exit code 0 without having called init_process_group(), and others, `waiting`, have
    called it."""

    workers: tuple[str, ...]
    waiting: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        ended, waiting = named(self.workers), named(self.waiting)
        return (
            f"ended with exit code 0 without torch.distributed.init_process_group(): {ended}; called it: {waiting}. In "
            "a process group of all workers these wait for the others until its timeout"
        )


@dataclass(frozen=True)
class ExitsAwaited(Event):
    """The training is finished for `after_s` seconds, and these workers still run."""

    workers: tuple[str, ...]
    after_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"the training was finished {self.after_s:.0f} s ago, and the job waits for the exit of "
            f"{named(self.workers)}: the rest of the script runs, a thread that is no daemon, or a child process that "
            f"it waits for. `farandole stacks --worker {self.workers[0]}` shows what it does"
        )


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was saved: the state after `step` decided steps is in the folder `name`, and `worker` wrote it in
    this time."""

    worker: str
    step: int
    name: str
    took_s: float

    def line(self) -> str:
        return f"{self.worker} saved step {self.step} as {self.name} in {self.took_s:.1f} s"


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint failed. Training continues; earlier checkpoints are untouched, and the next one is tried at its
    time."""

    worker: str
    step: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} could not save step {self.step}: {self.reason}; earlier checkpoints are untouched"


@dataclass(frozen=True)
class StateLost(Event):
    """No worker that held the state is left. Newcomers continue from the newest checkpoint, in `run_id`."""

    run_id: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"no worker that held the state is left ({self.reason}); continuing from the newest checkpoint"


@dataclass(frozen=True)
class StopAsked(Event):
    """A signal requested the end of the job. `grace_s`: the time that workers may take."""

    signal: str
    grace_s: float

    def line(self) -> str:
        is_request = self.signal in ("SIGINT", "SIGTERM")
        more = "a second signal" if is_request else "SIGTERM or Ctrl-C twice"
        return (
            f"{self.signal}: the workers are asked to end, and are killed after {self.grace_s:g} s (--grace); "
            f"{more} kills them at once"
        )


@dataclass(frozen=True)
class JobEnds(Event):
    """The last event of a job."""

    exit_code: int
    reason: str

    def line(self) -> str:
        return f"the job ends with exit code {self.exit_code}: {self.reason}"


@dataclass(frozen=True)
class ConnectionRefused(Event):
    """A connection was refused: the peer did not send, or prove, the data that is needed to be served. The job is
    unharmed."""

    who: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"refused a connection from {self.who}: {self.reason}"


@dataclass(frozen=True)
class JobNotAnnounced(Event):
    """Commands such as `farandole status` will not find the job. It still runs."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"farandole status, scale and drain will not find this job: {self.reason}"


@dataclass(frozen=True)
class CoordinatorStalled(Event):
    """The coordinator could not run for a while; its deadlines are extended by that time."""

    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the coordinator could not run for {self.stalled_s:.2f} s; all deadlines are extended by that time"


# Events of generations: why a new one comes, how it starts, and its cost ----------------------------------------------


@dataclass(frozen=True)
class RegroupBegan(Event):
    """A fault ended the running generation; `number` is the next one."""

    number: int
    reason: str
    survivors: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        who = f"with {named(self.survivors)}" if self.survivors else "without survivors"
        return f"regrouping for generation {self.number} {who}: {self.reason}"


@dataclass(frozen=True)
class ChangePlanned(Event):
    """Members were asked to move to generation `number` at their next boundary."""

    number: int
    reason: str

    def line(self) -> str:
        return f"generation {self.number} is planned: {self.reason}"


@dataclass(frozen=True)
class TooFewWorkers(Event):
    """Survivors are ready, and wait until enough other workers have come."""

    number: int
    present: int
    min_np: int
    timeout_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"generation {self.number} needs {count(self.min_np, 'worker')} and has {self.present}; "
            f"waiting for up to {self.timeout_s:g} s (--elastic-timeout)"
        )


@dataclass(frozen=True)
class GenerationStarted(Event):
    """A generation started. `workers` by rank. `regroup_s`: from the fault or the plan to START; 0 for the first
    generation."""

    number: int
    workers: tuple[str, ...]
    bootstrap: bool
    regroup_s: float

    def line(self) -> str:
        after = f" after {1000 * self.regroup_s:.0f} ms" if self.regroup_s else ""
        who = f"{count(len(self.workers), 'worker')}: {named(self.workers)}"
        return f"generation {self.number} starts{after} with {who}"


@dataclass(frozen=True)
class TransportChosen(Event):
    """The transport of a generation was chosen. `way` describes it for people; later generations have the same unless a
    new event reports another."""

    number: int
    way: str

    def line(self) -> str:
        return f"transport of generation {self.number}: {self.way}"


@dataclass(frozen=True)
class LinksDistrusted(Event):
    """Connections between living workers kept failing, or were proved to be broken; these workers are stopped to remove
    them. `between`: the hosts and addresses of those that were between hosts."""

    number: int
    links: tuple[str, ...]
    workers: tuple[str, ...]
    is_proved: bool = False
    between: tuple[str, ...] = ()
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        what = "between living workers are broken" if self.is_proved else "failed again"
        where = f"{', '.join(self.links)}: {'; '.join(self.between)}" if self.between else ", ".join(self.links)
        return f"connections {what} in generation {self.number} ({where}); stopping {named(self.workers)}"


@dataclass(frozen=True)
class Recovered(Event):
    """All members have applied a step again, after a fault or a planned change; the event has the durations.
    Milliseconds, one after the other; those after START are of `slowest`, the member that took longest.

    lost           members that were lost, and how they ended; `last_lines` of their stderr
    noticed        the sign by which the coordinator noticed it. A worker's actual time of death is unknown: the time
                   begins here
    silent_ms      the time for which a host had been silent when the recovery began
    ready_ms       until all members were quiescent and START was sent
    connected_ms   until the data connections existed
    synced_ms      until all members had the state
    first_step_ms  until a step was applied
    steps_redone, samples_redone  begun before, and repeated; under the commit rule those since the commit
    counts         the unit of progress, as in FirstStep (wire/messages.py)
    began_at       progress in that unit when training continued
    lost_at        least progress in that unit when no holder of the state was left: training continued from a
                   checkpoint. None: a worker held the state
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
    counts: Literal["step", "commit"] = "step"
    began_at: int = 0
    lost_at: int | None = None

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
        back = f"; {self._how_far_back()}" if self._how_far_back() else ""
        return f"{verb} in {self.total_ms:.0f} ms {what}: {', '.join(phases)}{back}; slowest {self.slowest}"

    def _how_far_back(self) -> str:
        if self.lost_at is not None:
            # Steps are observed only now and then: the last observed one may be older than the checkpoint.
            lost_at = f" from {self.counts} {self.lost_at} or later" if self.lost_at > self.began_at else ""
            return f"went back{lost_at} to the checkpoint at {self.counts} {self.began_at}"
        redone = count(self.steps_redone, "step")
        if self.counts == "step" or not self.steps_redone:
            return f"{redone} redone" if self.steps_redone else ""
        if not self.began_at:
            return f"went back {redone} to the beginning, since nothing was committed"
        return f"went back {redone} to commit {self.began_at}"


# Workers, from their start to their end -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSpawned(Event):
    """A worker was started. `restart` is 0 for the first worker of a slot, `rank` and `local_rank` the ranks that it
    will most likely get, `attempt` how often all workers have been started again."""

    worker: str
    slot: int
    host: str
    restart: int
    restarts: int
    rank: int | None = None
    local_rank: int | None = None
    attempt: int = 0

    def line(self) -> str:
        again = f", restart {self.restart} of {self.restarts}" if self.restart else ""
        again += f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"starting {self.worker} in slot {self.slot} on {self.host}{again}"


@dataclass(frozen=True)
class ForkServerReady(Event):
    """The fork server is ready: workers are forked by this process from now on."""

    pid: int

    def line(self) -> str:
        return f"the fork server (process {self.pid}) is ready"


@dataclass(frozen=True)
class ForkServerLost(Event):
    """The fork server was lost: workers are started in the plain way until there is another one."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the fork server is lost ({self.reason}); workers are started without it"


@dataclass(frozen=True)
class SpareWaits(Event):
    """A worker waits at its elastic function, and is admitted when a member is lost."""

    worker: str
    slot: int
    host: str

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) waits as a spare on {self.host}"


@dataclass(frozen=True)
class SparesMissing(Event):
    """The job has no slots for some of the requested spares."""

    spares: int
    missing: int
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        spares = f"{count(self.spares, 'spare')} (--spares)"
        return f"{self.missing} of {spares} cannot be started: the hosts have no more slots"


@dataclass(frozen=True)
class SlotsMissing(Event):
    """The hosts have fewer slots than the job wants workers. `ends_in_s`: time until the start is abandoned; None once
    there is a generation, whose workers continue."""

    missing: int
    wanted: int
    ends_in_s: float | None
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        there = self.wanted - self.missing
        text = f"waiting for {count(self.missing, 'more slot')} ({there} of {self.wanted} are available)"
        return text if self.ends_in_s is None else f"{text}; the job ends in {self.ends_in_s:.0f} s (--start-timeout)"


@dataclass(frozen=True)
class SlotBackoff(Event):
    """A slot's workers fail repeatedly: `failures` in a row failed soon after their start, so no other one is started
    there for `pause_s`."""

    slot: int
    host: str
    failures: int
    pause_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"slot {self.slot} on {self.host} is in backoff for {self.pause_s:g} s: {self.failures} workers in a row "
            "failed there soon after their start"
        )


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker was lost. `last_lines` is the end of its stderr, as far as its agent had it. `restarts_left` of its
    slot; None where no budget counts, because a lost worker costs its host."""

    worker: str
    slot: int
    how: str
    restarts_left: int | None
    last_lines: tuple[str, ...] = ()
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        left = "" if self.restarts_left is None else f"; {count(self.restarts_left, 'restart')} left for its slot"
        return f"lost {self.worker} (slot {self.slot}): it {self.how}{left}"


@dataclass(frozen=True)
class WorkerFailed(Event):
    """The failure of a worker in detail, where no worker had entered an elastic function. Several workers may fail in
    one attempt; the root cause is the earliest failure.

    rank, local_rank  the place for which it was started
    exit_code         negative for a signal; None: its agent was lost
    message           the last line of the exception, from its error file or as init() reports it; empty: unknown
    traceback         the whole text
    error_file        its path; empty: there is none
    time_s            from the error file, in seconds since 1970; 0: unknown
    was_stopped       it was being stopped already because of another failure
    """

    worker: str
    host: str
    rank: int
    local_rank: int
    attempt: int
    pid: int
    exit_code: int | None
    message: str = ""
    traceback: str = ""
    error_file: str = ""
    time_s: int = 0
    was_stopped: bool = False

    def line(self) -> str:
        what = f": {self.message}" if self.message else ""
        return f"rank {self.rank} ({self.worker}, process {self.pid} on {self.host}) failed{what}"


@dataclass(frozen=True)
class AllWorkersRestart(Event):
    """A worker failed while none had entered an elastic function, or there are slots for more workers: all are stopped
    and started again, `workers` of them. `attempt` counts from 1; `attempts` is None where no worker failed."""

    workers: int
    attempt: int
    attempts: int | None
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        whom = f"all {self.workers} workers" if self.workers != 1 else "the worker"
        if self.attempts is None:
            return f"restarting all workers, {self.workers} from now on: {self.reason}"
        return f"restarting {whom} (attempt {self.attempt} of {self.attempts}): {self.reason}"


@dataclass(frozen=True)
class WorkerEnded(Event):
    """The end of a worker that the job does not need any more: it finished, or it left, or it was not needed."""

    worker: str
    slot: int
    how: str

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) {self.how}"


@dataclass(frozen=True)
class WorkerLeaves(Event):
    """A worker was asked to leave, and leaves at the next boundary."""

    worker: str
    slot: int

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) was asked to leave and does so at the next boundary"


@dataclass(frozen=True)
class UserCodeFailed(Event):
    """An exception of the script has ended a worker."""

    worker: str
    summary: str
    traceback: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} raised {self.summary}\n{self.traceback}".rstrip()


@dataclass(frozen=True)
class StallNoticed(Event):
    """No member has made progress for long, and there is no step timeout: the stall is only reported."""

    step: int
    in_own_code: tuple[str, ...]
    waiting: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        hung = f"{named(self.in_own_code)} in their own code" if self.in_own_code else "no worker in its own code"
        return (
            f"no step for {self.stalled_s:.0f} s after step {self.step}: {hung}, {named(self.waiting)} waiting; "
            "--step-timeout S stops workers that block the others for S seconds"
        )


@dataclass(frozen=True)
class WorkersHung(Event):
    """Workers hang: they have made no progress since `step` while all others wait for them; they are stopped."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        who = named(self.workers)
        return (
            f"stopping {who}: all other workers waited at step {self.step} for {self.stalled_s:.0f} s (--step-timeout)"
        )


@dataclass(frozen=True)
class WorkerStacks(Event):
    """The stacks of the threads of a worker that was stopped for making no progress."""

    worker: str
    stacks: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the threads of {self.worker} when it was stopped:\n{main_first(self.stacks)}".rstrip()


def main_first(stacks: str) -> str:
    """Move the main thread of these stacks to the front, since readers look for the script first. faulthandler writes
    the newest thread first, and so the main thread last."""
    *others, main = stacks.rstrip().split("\n\n")
    _, *frames = main.split("\n")
    return "\n\n".join(["\n".join(["The main thread (most recent call first):", *frames]), *others])


@dataclass(frozen=True)
class CollectiveStalled(Event):
    """All members wait for each other since `step`: a connection between them is broken, or they run different code."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"all {count(len(self.workers), 'worker')} have waited for each other at step {self.step} for "
            f"{self.stalled_s:.0f} s (--step-timeout)"
        )


@dataclass(frozen=True)
class StateHash(Event):
    """In strict mode, at the end of an epoch, or with `--hash-every` within it: the SHA-256 of parameters, buffers and
    optimizer state after `step` steps."""

    step: int
    epoch: int
    hash: str

    def line(self) -> str:
        return f"the state after step {self.step}, of epoch {self.epoch}: {self.hash}"


@dataclass(frozen=True)
class ShardWrong(Event):
    """In strict mode, a worker has computed a shard wrongly; `witnesses` did so rightly. The step was not applied.
    The worker ends, and no other one is started in its slot."""

    step: int
    shard: int
    worker: str
    host: str
    witnesses: tuple[str, ...]
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"{self.worker} on {self.host} has computed shard {self.shard} of step {self.step} wrongly, as the results "
            f"of {named(self.witnesses)} show. It ends, and its slot is not used again; test the processor and the "
            f"memory of {self.host}"
        )


@dataclass(frozen=True)
class StragglerFound(Event):
    """With `--balance auto`: a worker has computed slowly for 20 steps in a row. Its speed is below half of the others'
    median, `percent` of it. It gets fewer samples of each global batch meanwhile."""

    worker: str
    rank: int
    host: str
    percent: int
    step: int
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"{self.worker} (rank {self.rank}) on {self.host} is a straggler at step {self.step}: it computes at "
            f"{self.percent} % of the others' speed"
        )


@dataclass(frozen=True)
class StragglerRecovered(Event):
    """With `--balance auto`: a worker that was a straggler has reached 60 % of the others' median speed, or more."""

    worker: str
    rank: int
    host: str
    percent: int
    step: int

    def line(self) -> str:
        return (
            f"{self.worker} (rank {self.rank}) on {self.host} is no straggler any more at step {self.step}: it "
            f"computes at {self.percent} % of the others' speed"
        )


@dataclass(frozen=True)
class StatesDiverged(Event):
    """States differ: these workers had another state than `source` after `step` steps. `name`: the first parameter,
    buffer or other tensor that differed, of `objects`. They have copied the state of `source`, or the job ends."""

    step: int
    name: str
    objects: int
    workers: tuple[str, ...]
    source: str
    is_fatal: bool
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        more = f" and {count(self.objects - 1, 'more tensor')}" if self.objects > 1 else ""
        who = named(self.workers)
        done = "the job ends" if self.is_fatal else f"{who} copied the state of {self.source}"
        return f"the states of workers differed at step {self.step}: {self.name}{more} of {who}; {done}"


@dataclass(frozen=True)
class StoppedWorkerKilled(Event):
    """A worker was stopped (SIGSTOP) for longer than the detection budget, and was killed because of it."""

    worker: str
    budget_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} was stopped by a signal for {self.budget_s:g} s; it is killed"
