"""The coordinator's knowledge of its job, and the transition that a decision makes of it. Pure; `decide` uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import msgspec

from farandole.base.config import JobConfig
from farandole.base.membership import DataAddress, GenerationId, Origin, Placement, Progress, Shortfall
from farandole.base.wire.link_messages import FirstStep


class Slot(msgspec.Struct, frozen=True, order=True):
    """Capacity for one worker: the `index`-th slot of an agent. A key of many mappings, so its hash must be fast."""

    agent: str
    index: int


@dataclass(frozen=True)
class AgentRecord:
    """An agent. `order` ranks the workers of earlier hosts first. A lost agent stays known, and may come back empty.

    is_draining  no further workers are started there, and the agent is dismissed once its workers have left
    """

    name: str
    host: str
    slots: int
    order: int
    is_connected: bool = True
    is_draining: bool = False


@dataclass(frozen=True)
class Offer:
    """A host that the job may use. `order` counts the hosts as they were offered; a host that comes back is new."""

    slots: int
    order: int


@dataclass(frozen=True)
class Ban:
    """The exclusion of a host where workers were lost: no worker is started there until `until_s` (None: ever), unless
    `is_over`. The count of failures outlives the ban."""

    failures: int
    until_s: float | None
    is_over: bool = False


@dataclass(frozen=True)
class SlotUse:
    """The job's use of a slot.

    is_open       the job wants a worker here
    restarts      how often a lost worker was replaced
    is_given_up   a worker left it on an outside request: not to be filled again
    is_held_back  the last worker raised an exception, or exited with success: no other one before the remaining members
                  have shown, by being READY, that they continue without it
    failures      how many workers in a row failed soon after their start
    backoff_until_s no other worker before, because of these failures
    """

    is_open: bool = True
    restarts: int = 0
    is_held_back: bool = False
    is_given_up: bool = False
    failures: int = 0
    backoff_until_s: float | None = None


@dataclass(frozen=True)
class Worker:
    """A worker whose process is not known to be gone.

    place        the place for which it was started
    address      where its peers find it; None until it called init()
    pid          of its process, as the worker reported it; 0 until then
    is_elastic   its main thread entered an elastic function
    elastic_s    when it did
    ready        last generation number for which it is quiescent
    synced       last generation in which it confirmed the state; above 0 it is a holder
    stepped      last generation in which it reported its first step
    finished     last generation in which its elastic function returned
    shortfall    the part of its loader's promised work that it had not done then
    static_because  why it trains on as a part of a static job then; empty: it does not
    is_awaited   the members wait for it: its slot is new to the job
    is_leaving   it leaves at the next boundary
    was_asked    and that because the worker itself was asked (SIGTERM): it cannot be revoked
    has_left     the others continue without it: no member any more, and its messages are ignored
    is_dying     its main thread has ended: no member any more; its slot is taken until the exit is known
    raised       last line of the exception that ends it
    kill_at_s    a worker whose code raised, or that was released, is killed if it still lives then
    killed_for   the reason why it was killed
    has_met      it has met others in a process group of torch.distributed, or called init()
    """

    name: str
    slot: Slot
    place: Placement | None = None
    address: DataAddress | None = None
    pid: int = 0
    is_elastic: bool = False
    elastic_s: float | None = None
    ready: int = 0
    synced: int = 0
    stepped: int = 0
    finished: int = 0
    shortfall: Shortfall | None = None
    static_because: str = ""
    is_awaited: bool = False
    is_leaving: bool = False
    was_asked: bool = False
    has_left: bool = False
    is_dying: bool = False
    raised: str | None = None
    kill_at_s: float | None = None
    killed_for: str | None = None
    has_met: bool = False


@dataclass(frozen=True)
class Generation:
    """The membership that was started last; `members` by rank."""

    id: GenerationId
    members: tuple[str, ...]

    @property
    def number(self) -> int:
        return self.id.number

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        return {name: rank for rank, name in enumerate(self.members)}


@dataclass(frozen=True)
class Change:
    """A regroup that was announced to the members and has not started yet.

    is_planned     announced by PREPARE: the running generation continues until a boundary. Once announced it is
                   never revoked, since a member may have left the old generation already: it ends with
                   START, or with an ABORT of a higher number.
    began_s        when the first fault, or the plan, happened
    reason         the same in words
    short_since_s  since when there have been fewer workers than min_np
    """

    number: int
    is_planned: bool
    began_s: float
    reason: str
    short_since_s: float | None = None


@dataclass(frozen=True)
class Loss:
    """The death of a worker. The job keeps that of a member until its recovery is reported.

    worker          its name
    sentence        what happened
    how             the predicate of its end ("it ..."); empty while it is dying: its exit is not known yet
    exit_code       None: not known, not started, or lost with its agent
    raised          last line of the exception that ended it
    last_lines      of its output
    noticed         the means of detection
    silent_since_s  when the last sign of its host arrived, where silence was the means
    number          of the generation that lost it; 0: none did
    """

    worker: str
    sentence: str
    how: str = ""
    exit_code: int | None = None
    raised: str | None = None
    last_lines: tuple[str, ...] = ()
    noticed: str = "its exit"
    silent_since_s: float | None = None
    number: int = 0


@dataclass(frozen=True)
class Recovery:
    """A regroup whose members have not all applied a step yet. It may have taken several generations.

    number    of the newest generation
    began_s   when the first fault, or the plan, happened
    started_s when the newest generation was started
    slowest   the worker that took longest from START to its first step, among those that have applied one
    step      its report; None: no worker has applied a step
    steps_redone, samples_redone  the most that any of these workers reported
    """

    number: int
    is_planned: bool
    reason: str
    began_s: float
    started_s: float
    slowest: str = ""
    step: FirstStep | None = None
    steps_redone: int = 0
    samples_redone: int = 0


@dataclass(frozen=True)
class Finding:
    """The result of a member's attempts to connect to its neighbours, and its time."""

    at_s: float
    reachable: frozenset[str]
    unreachable: frozenset[str]


@dataclass(frozen=True)
class LinkTrouble:
    """Reports of failed connections between members that both live.

    hints       pairs of workers, reported in the running generation
    left        why members have left it by themselves, without a fault of the others, by name
    deadline_s  when a report that no exit has explained counts
    retries     generations with unchanged members that were started for such reports, in a row
    findings    the newest one of each member that has probed its neighbours in the running generation
    asked       members that were asked to probe, and have not answered yet
    verdict_s   when links that are proved to be broken cost workers
    """

    hints: frozenset[tuple[str, str]] = frozenset()
    left: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    retries: int = 0
    findings: Mapping[str, Finding] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    verdict_s: float | None = None


@dataclass(frozen=True)
class StepStall:
    """A stall: all members waited for each other at this step, `times` times."""

    step: int
    times: int


@dataclass(frozen=True)
class WholeRestart:
    """A restart of all workers that was decided: their exits are awaited. `reason` is the failure, in words."""

    reason: str


@dataclass(frozen=True)
class Ending:
    """The end of a job: only the exits of its last workers are awaited, until `deadline_s`."""

    exit_code: int
    reason: str
    deadline_s: float
    is_done: bool = False


@dataclass(frozen=True)
class Job:
    """The state of one job in its coordinator. Mappings are never changed in place.

    target         workers wanted: -np, less those that left, or the size of a later scale command; or the number of
                   slots, where the job fills them
    most           most workers where the job fills slots; None: any number
    spares         workers wanted beyond that, to wait (capacity.py); missing_spares: those without a slot
    missing_slots  wanted workers without a slot, as reported to the user
    offers         hosts that may be used, by name; None: all whose agents join
    may_get_hosts  other hosts may be offered, or join, later
    offered        hosts offered so far
    first_hosts    hosts of the launcher's own agents, which connect in any order: their workers come before those of
                   agents that join by themselves, and their slots are reserved until the first generation
    bans           hosts where workers were lost, by name
    resets         generations started after the first one
    run_id         above that of every checkpoint that existed when the job started
    saves          the job writes checkpoints
    has_checkpoint there is one to resume from, of an earlier job, or of this one as far as the coordinator knows
    published      the progress of the newest checkpoint that the coordinator has permitted; by path, that of each file
                   of the script's own (save_once)
    workers        by name, in the order in which they were started; names are never used again
    spawned        workers started so far
    number         highest generation number announced so far; numbers are never used again
    is_elastic     some worker entered an elastic function: losses are survived
    was_synced     some worker confirmed the state: no generation is a bootstrap any more
    is_finishing   some member's elastic function returned: no worker is admitted any more
    is_released    all members have finished and were told so
    released_s     when; None once the members were named that still ran a while later
    static_because  why the members train on as a static job, although they had entered an elastic function: none is
                   admitted any more; empty: they do not
    fixed_because  why only one number of workers may train, also after such a job has gone on with fewer; empty: any
                   number may
    free_config    the config of such a job with the limits that it was started with; None: no number is fixed
    losses         lost members whose recovery has not been reported yet
    steps_seen     steps, or commits, decided as far as the coordinator knew at the last loss
    lost_at        steps_seen when the state was lost; None once it was reported how far the job went back
    lease_end_s    until then workers of hosts that were lost may run unobserved
    restart_deferred_until_s  replacements of lost workers are not started before, or until the survivors train again
    plain_exits    workers that exited with code 0 and never called init()
    never_met      those of them that have met no others in a process group of torch.distributed either
    alone          workers that have trained and have not met the others, also those that are gone
    has_met        some worker has met others in a process group of torch.distributed, or in init()
    attempt        how often all workers have been started again (whole_restart.py)
    failed_attempts  how often that was because of a failure
    enough_since_s since when workers that are about to start together have enough slots
    whole_restart  the restart of all workers that is under way: none is started before all are gone
    """

    config: JobConfig
    job_id: str
    coordinator_epoch: int
    target: int
    most: int | None = None
    spares: int = 0
    missing_spares: int = 0
    missing_slots: int = 0
    offers: Mapping[str, Offer] | None = None
    may_get_hosts: bool = False
    offered: int = 0
    first_hosts: Mapping[str, Offer] = field(default_factory=dict)
    bans: Mapping[str, Ban] = field(default_factory=dict)
    resets: int = 0
    run_id: int = 1
    saves: bool = False
    has_checkpoint: bool = False
    published: Mapping[str, Progress] = field(default_factory=dict)
    agents: Mapping[str, AgentRecord] = field(default_factory=dict)
    slots: Mapping[Slot, SlotUse] = field(default_factory=dict)
    workers: Mapping[str, Worker] = field(default_factory=dict)
    spawned: int = 0
    number: int = 0
    generation: Generation | None = None
    change: Change | None = None
    is_elastic: bool = False
    was_synced: bool = False
    is_finishing: bool = False
    is_released: bool = False
    released_s: float | None = None
    static_because: str = ""
    fixed_because: str = ""
    free_config: JobConfig | None = None
    losses: tuple[Loss, ...] = ()
    steps_seen: int = 0
    lost_at: int | None = None
    lease_end_s: float | None = None
    recovery: Recovery | None = None
    restart_deferred_until_s: float | None = None
    plain_exits: tuple[str, ...] = ()
    never_met: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    has_met: bool = False
    attempt: int = 0
    failed_attempts: int = 0
    enough_since_s: float | None = None
    whole_restart: WholeRestart | None = None
    links: LinkTrouble = LinkTrouble()
    stall: StepStall | None = None
    start_deadline_s: float | None = None
    ending: Ending | None = None

    def is_member(self, name: str) -> bool:
        """Return whether the worker belongs to the generation that was started last."""
        return self.generation is not None and name in self.generation.ranks

    def survivors(self) -> list[Worker]:
        """Return the members of the last generation that have not been lost, by rank."""
        return list(self.each_survivor())

    def each_survivor(self) -> Iterator[Worker]:
        """Yield the survivors: for rules that mostly need to see only the first ones."""
        for name in self.generation.members if self.generation else ():
            worker = self.workers.get(name)
            if worker is not None and not (worker.has_left or worker.is_dying):
                yield worker

    def is_survivor(self, name: str) -> bool:
        """Return whether the worker is a member of the last generation and has not been lost."""
        worker = self.workers.get(name)
        return worker is not None and self.is_member(name) and not (worker.has_left or worker.is_dying)

    def staying(self) -> list[Worker]:
        """Return the survivors that are not to leave, by rank."""
        return [worker for worker in self.each_survivor() if not worker.is_leaving]

    @property
    def generation_number(self) -> int:
        """The number of the generation that was started last; 0: none was."""
        return 0 if self.generation is None else self.generation.number

    @property
    def is_regrouping(self) -> bool:
        """Whether the last generation was ended by a fault, and the next one has not started."""
        return self.change is not None and not self.change.is_planned

    @property
    def needed_at_start(self) -> int:
        return max(self.target, self.config.num_proc) if self.config.fills_slots else self.target

    def losses_now(self) -> list[Loss]:
        """Return the losses since the last START; after the release the members that failed."""
        return [loss for loss in self.losses if loss.number == self.generation_number > 0]

    def candidates(self) -> list[Worker]:
        """Return the workers that wait to be admitted, READY for any generation, in the order of their slots."""
        waiting = [worker for worker in self.newcomers() if worker.is_elastic and worker.raised is None]
        return sorted(waiting, key=self.slot_order)

    def awaited(self) -> list[Worker]:
        """Return the newcomers that the members wait for and that are not ready to be admitted yet."""
        if self.is_finishing:
            return []
        return [w for w in self.newcomers() if w.is_awaited and not w.is_elastic and w.raised is None]

    def is_refill_due(self) -> bool:
        """Return whether a slot that is in backoff will get a worker again."""
        waiting = (use for use in self.slots.values() if use.is_open and use.backoff_until_s is not None)
        return any(use.restarts < self.config.restarts and not use.is_held_back for use in waiting)

    def may_have(self) -> int:
        """Return how many members there may be, when all workers that can be started have come."""
        staying = {worker.slot for worker in self.staying()}
        startable = {
            slot
            for slot, use in self.slots.items()
            if use.is_open and use.restarts < self.config.restarts and not self.is_banned(self.host(slot))
        }
        return len(staying | startable | {worker.slot for worker in self.newcomers()})

    def is_banned(self, host: str) -> bool:
        """Return whether no worker may be started on the host, because workers were lost there."""
        return host in self.bans and not self.bans[host].is_over

    def may_get_slots(self) -> bool:
        """Return whether the job may get more slots later without an action of the user."""
        if self.may_get_hosts:
            return True
        cooling = [host for host, ban in self.bans.items() if not ban.is_over and ban.until_s is not None]
        return any(self.offers is None or host in self.offers for host in cooling)

    def newcomers(self) -> list[Worker]:
        """Return the workers that are not members and may become members, at any stage of their start."""
        members = self.generation.ranks if self.generation else {}
        return [
            worker
            for name, worker in self.workers.items()
            if not (name in members or worker.has_left or worker.is_dying or worker.is_leaving or worker.killed_for)
        ]

    def has_finished(self, worker: Worker) -> bool:
        """Return whether a member has returned from its elastic function and waits for the others. READY for a later
        generation revokes it."""
        number = self.generation_number
        return worker.finished == number > 0 and worker.ready <= number

    def slot_order(self, worker: Worker) -> tuple[int, int]:
        """Return a sort key that groups the workers of one host."""
        return self.agents[worker.slot.agent].order, worker.slot.index

    def host_of(self, worker: Worker) -> str:
        return self.host(worker.slot)

    def host(self, slot: Slot) -> str:
        return self.agents[slot.agent].host


def new_job(
    config: JobConfig,
    job_id: str,
    coordinator_epoch: int = 1,
    origin: Origin | None = None,
    first_hosts: Mapping[str, int] = MappingProxyType({}),
) -> Job:
    """Return a job that waits for its first agent. `origin`: where its numbers begin, when it writes checkpoints;
    `first_hosts`: those of the launcher's own agents, with their slots, in the order of their ranks."""
    begins = Origin(1, 0, has_checkpoint=False) if origin is None else origin
    return Job(
        config=config,
        job_id=job_id,
        coordinator_epoch=coordinator_epoch,
        target=0 if config.fills_slots else config.num_proc,
        most=config.max_np,
        spares=config.spares,
        may_get_hosts=config.takes_agents,
        first_hosts={host: Offer(slots, order) for order, (host, slots) in enumerate(first_hosts.items())},
        run_id=begins.run_id,
        number=begins.generation,
        saves=origin is not None,
        has_checkpoint=begins.has_checkpoint,
    )
