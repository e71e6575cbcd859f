"""All that the coordinator knows about its job: values, and questions about them. `decide` uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from farandole.config import JobConfig
from farandole.membership import Address, GenerationId, Origin, Progress, Shortfall
from farandole.messages import FirstStep


@dataclass(frozen=True, order=True)
class Slot:
    """Room for one worker: the `index`-th of an agent."""

    agent: str
    index: int


@dataclass(frozen=True)
class Agent:
    """`order`: workers of hosts that came earlier come first. A lost agent stays known, and may come back empty.

    is_draining  nothing is started there any more, and it is dismissed once its workers have left
    """

    name: str
    host: str
    slots: int
    order: int
    is_connected: bool = True
    is_draining: bool = False


@dataclass(frozen=True)
class Offer:
    """A host that the job may use. `order` counts the hosts as they were offered; one that comes back is new."""

    slots: int
    order: int


@dataclass(frozen=True)
class Ban:
    """A host where workers were lost: nothing is started there until `until_s` (None: ever), unless that is over.
    The count of failures outlives the ban."""

    failures: int
    until_s: float | None
    is_over: bool = False


@dataclass(frozen=True)
class SlotUse:
    """How the job uses a slot.

    is_open       the job wants a worker here
    restarts      how often a lost worker was replaced
    is_given_up   a worker left it because somebody outside wanted so: not to be filled again
    is_held_back  the last worker raised an exception, or ended well: no other one before the remaining
                  members have shown, by being READY, that they go on without it
    failures      how many workers in a row failed soon after their start
    backoff_until_s no other one before, because of that
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

    address      where its peers find it; None until it called init()
    pid          of its process, as it said itself; 0 until then
    is_elastic   its main thread entered an elastic function
    elastic_s    when it did
    ready        last generation number for which it is quiescent
    synced       last generation in which it confirmed the state; above 0 it is a holder
    finished     last generation in which its elastic function returned
    shortfall    what it did not do then of what its loader had promised
    is_awaited   the members wait for it: its slot is new to the job
    is_leaving   it goes at the next boundary
    was_asked    and that because somebody asked the worker itself (SIGTERM): it cannot be taken back
    has_left     the others go on without it: no member any more, and nothing it says counts
    is_dying     its main thread has ended: no member any more; its slot is taken until the exit is known
    raised       last line of the exception that ends it
    kill_at_s    a worker whose code raised, or that was let go, is killed if it still lives then
    killed_for   why it was killed
    """

    name: str
    slot: Slot
    address: Address | None = None
    pid: int = 0
    is_elastic: bool = False
    elastic_s: float | None = None
    ready: int = 0
    synced: int = 0
    finished: int = 0
    shortfall: Shortfall | None = None
    is_awaited: bool = False
    is_leaving: bool = False
    was_asked: bool = False
    has_left: bool = False
    is_dying: bool = False
    raised: str | None = None
    kill_at_s: float | None = None
    killed_for: str | None = None


@dataclass(frozen=True)
class Generation:
    """The membership that was started last; `members` by rank."""

    id: GenerationId
    members: tuple[str, ...]

    @property
    def number(self) -> int:
        return self.id.number


@dataclass(frozen=True)
class Change:
    """A regroup that was announced to the members and has not started yet.

    is_planned     announced by PREPARE: the running generation goes on until a boundary. Once announced it is
                   never taken back, since a member may have left the old generation already: it ends with
                   START, or with an ABORT of a higher number.
    began_s        when the first fault, or the plan, happened
    reason         that, in words
    short_since_s  since when there have been fewer workers than min_np
    """

    number: int
    is_planned: bool
    began_s: float
    reason: str
    short_since_s: float | None = None


@dataclass(frozen=True)
class Loss:
    """A member that was lost since the last START (after the release: that failed). `sentence` says how; of a worker
    that is `dying` more will be said."""

    sentence: str
    raised: str | None = None
    dying: str | None = None


@dataclass(frozen=True)
class LostMember:
    """A member that was lost, for the report of the recovery. `how` it ended follows "it", and is empty until its exit
    is known; `noticed` says by what, `silent_s` how long it or its host had been silent by then."""

    worker: str
    noticed: str
    silent_s: float = 0.0
    how: str = ""
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recovery:
    """A regroup whose members have not all applied a step yet. It may have taken several generations.

    number    of the newest of them
    began_s   when the first fault, or the plan, happened
    started_s when the newest was started
    steps     by worker, of those who have applied one
    """

    number: int
    is_planned: bool
    reason: str
    began_s: float
    started_s: float
    steps: Mapping[str, FirstStep] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What a member found when it tried to connect to its neighbours, and when."""

    at_s: float
    reachable: frozenset[str]
    unreachable: frozenset[str]


@dataclass(frozen=True)
class LinkTrouble:
    """Reports of failed connections between members that both live.

    hints       pairs of workers, reported in the running generation
    deadline_s  when a report that no exit has explained counts
    retries     generations with unchanged members that were started for such reports, in a row
    findings    the newest one of each member that has probed its neighbours in the running generation
    asked       members that were asked to probe, and have not answered yet
    verdict_s   when links that are proved to be broken cost workers
    """

    hints: frozenset[tuple[str, str]] = frozenset()
    deadline_s: float | None = None
    retries: int = 0
    findings: Mapping[str, Finding] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    verdict_s: float | None = None


@dataclass(frozen=True)
class Stall:
    """All members waited for each other at this step, so many times."""

    step: int
    times: int


@dataclass(frozen=True)
class Ending:
    """The job is over but for the exits of its last workers, which are waited for until `deadline_s`."""

    exit_code: int
    reason: str
    deadline_s: float
    is_done: bool = False


@dataclass(frozen=True)
class Job:
    """One job, as its coordinator knows it. Mappings are never changed in place.

    target         workers wanted: -np, less those that left, or what a person asked for later; or as many as
                   there are slots, where the job fills them
    most           most workers where the job fills slots; None: any number
    spares         workers wanted beyond that, to wait (spares.py); missing_spares: those there were no slots for
    missing_slots  for how many of the workers wanted there was no slot, as people were told
    offers         hosts that may be used, by name; None: all whose agents join
    may_get_hosts  other hosts may be offered, or join, later
    offered        hosts offered so far
    bans           hosts where workers were lost, by name
    resets         generations started after the first one
    run_id         above that of every checkpoint there was when the job started
    saves          the job writes checkpoints
    has_checkpoint there is one to go on from, of an earlier job, or of this one as far as the coordinator knows
    published      how far the newest checkpoint is that the coordinator has let pass; by path, how far each file of
                   the script's own is (save_once)
    workers        by name, in the order in which they were started; names are never used again
    spawned        workers started so far
    number         highest generation number announced so far; numbers are never used again
    is_elastic     some worker entered an elastic function: losses are survived
    was_synced     some worker confirmed the state: no generation starts from nothing any more
    is_finishing   some member's elastic function returned: nobody is admitted any more
    is_released    all members have finished and were told so
    losses         members lost since the last START
    steps_seen     steps, or commits, decided as far as the coordinator knew at the last loss
    lost_at        that, when the state was lost; None once it was told how far the job went back
    lease_end_s    until then workers of hosts that were lost may go on where nobody sees them
    lost_members   members lost of whom no recovery has been told yet
    restart_deferred_until_s  replacements of lost workers are not started before, or until the survivors train again
    plain_exits    workers that exited with code 0 and never called init()
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
    bans: Mapping[str, Ban] = field(default_factory=dict)
    resets: int = 0
    run_id: int = 1
    saves: bool = False
    has_checkpoint: bool = False
    published: Mapping[str, Progress] = field(default_factory=dict)
    agents: Mapping[str, Agent] = field(default_factory=dict)
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
    losses: tuple[Loss, ...] = ()
    steps_seen: int = 0
    lost_at: int | None = None
    lease_end_s: float | None = None
    lost_members: tuple[LostMember, ...] = ()
    recovery: Recovery | None = None
    restart_deferred_until_s: float | None = None
    plain_exits: tuple[str, ...] = ()
    links: LinkTrouble = LinkTrouble()
    stall: Stall | None = None
    start_deadline_s: float | None = None
    ending: Ending | None = None

    def is_member(self, name: str) -> bool:
        """Whether the worker belongs to the generation that was started last."""
        return self.generation is not None and name in self.generation.members

    def survivors(self) -> list[Worker]:
        """Members of the last generation that are still with us, by rank."""
        members = self.generation.members if self.generation else ()
        known = (self.workers.get(name) for name in members)
        return [worker for worker in known if worker is not None and not (worker.has_left or worker.is_dying)]

    def emergency_writer(self) -> str | None:
        """Who writes the emergency checkpoint when the job ends: the survivor of the lowest rank that holds the state
        and has not been asked to end for a reason of its own."""
        fit = (w.name for w in self.survivors() if w.synced and w.raised is None and not w.killed_for)
        return next(fit, None)

    def candidates(self) -> list[Worker]:
        """Workers that wait to be admitted, READY for any generation, in the order of their slots."""
        waiting = [worker for worker in self.newcomers() if worker.is_elastic and worker.raised is None]
        return sorted(waiting, key=self.slot_order)

    def awaited(self) -> list[Worker]:
        """Newcomers that the members wait for and that are not ready to be admitted yet."""
        if self.is_finishing:
            return []
        return [w for w in self.newcomers() if w.is_awaited and not w.is_elastic and w.raised is None]

    def is_refill_due(self) -> bool:
        """Whether a slot that is in backoff will get a worker again."""
        waiting = (use for use in self.slots.values() if use.is_open and use.backoff_until_s is not None)
        return any(use.restarts < self.config.restarts and not use.is_held_back for use in waiting)

    def is_banned(self, host: str) -> bool:
        """Whether nothing may be started on the host, because workers were lost there."""
        return host in self.bans and not self.bans[host].is_over

    def may_get_slots(self) -> bool:
        """Whether there may be more slots later, without anybody doing something to this job."""
        if self.may_get_hosts:
            return True
        cooling = [host for host, ban in self.bans.items() if not ban.is_over and ban.until_s is not None]
        return any(self.offers is None or host in self.offers for host in cooling)

    def newcomers(self) -> list[Worker]:
        """Workers that are no members and may become some, however far they are."""
        members = frozenset(self.generation.members if self.generation else ())
        return [
            worker
            for name, worker in self.workers.items()
            if not (name in members or worker.has_left or worker.is_dying or worker.is_leaving or worker.killed_for)
        ]

    def has_finished(self, worker: Worker) -> bool:
        """Whether a member has returned from its elastic function and waits for the others.
        READY for a later generation takes it back."""
        number = self.generation.number if self.generation else 0
        return worker.finished == number > 0 and worker.ready <= number

    def slot_order(self, worker: Worker) -> tuple[int, int]:
        """Sorting by this brings workers of one host together."""
        return self.agents[worker.slot.agent].order, worker.slot.index

    def host_of(self, worker: Worker) -> str:
        return self.host(worker.slot)

    def host(self, slot: Slot) -> str:
        return self.agents[slot.agent].host


def new_job(config: JobConfig, job_id: str, coordinator_epoch: int = 1, origin: Origin | None = None) -> Job:
    """A job that waits for its first agent. `origin`: where its numbers begin, when it writes checkpoints."""
    target = 0 if config.fills_slots else config.num_proc
    job = Job(
        config=config,
        job_id=job_id,
        coordinator_epoch=coordinator_epoch,
        target=target,
        most=config.max_np,
        spares=config.spares,
        may_get_hosts=config.takes_agents,
    )
    if origin is None:
        return job
    return replace(
        job,
        run_id=origin.run_id,
        number=origin.generation,
        saves=True,
        has_checkpoint=origin.has_checkpoint,
    )
