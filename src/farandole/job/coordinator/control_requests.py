"""Requests of the user: whether a change of the job can be executed, and the job's status. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.control import (
    Accepted,
    AskDrain,
    AskScale,
    AskUndrain,
    Declined,
    HostStatus,
    SlotInBackoff,
    Status,
    WorkerSummary,
)
from farandole.job.coordinator import capacity
from farandole.job.coordinator.job import AgentRecord, Job, Worker
from farandole.job.coordinator.sentences import counted, listed


def judge(job: Job, asked: AskScale | AskDrain | AskUndrain) -> Accepted | Declined:
    """Return the answer. A request that is accepted is to be decided; where it is fulfilled already, without effect."""
    reason = _why_not_now(job)
    if reason is not None:
        return Declined(reason)
    match asked:
        case AskScale(size):
            return _scale(job, size)
        case AskDrain(host) | AskUndrain(host) if host not in (known := _slots_by_host(job)):
            return Declined(f"the job has no host {host!r}; its hosts: {listed(known)}")
        case AskDrain(host):
            return _drain(job, host)
        case AskUndrain(host) if _is_drained(job, host):
            return Accepted(f"host {host} may be used again")
        case AskUndrain(host):
            return Declined(f"host {host} is not drained")


def _why_not_now(job: Job) -> str | None:
    if job.ending is not None:
        return f"the job is ending: {job.ending.reason}"
    if job.is_released or job.is_finishing:
        return "the training is finishing"
    if job.generation is None:
        return "the job is starting: not all of its workers have called init() yet; try again once training has started"
    if job.static_because:
        return f"the job has become static, and the number of its workers is fixed: {job.static_because}"
    if not job.is_elastic:
        return "no worker has entered an elastic function: the number of workers of a static script is fixed"
    return None


def _scale(job: Job, size: int) -> Accepted | Declined:
    low, high = job.config.min_np, job.config.max_np
    if job.free_config is not None and size != low:
        return Declined(f"each step of the job needs {counted(low, 'worker')}: {job.fixed_because}")
    if size < low:
        return Declined(f"{counted(size, 'worker')} {_is(size)} fewer than --min-np {low}")
    if high is not None and size > high:
        return Declined(f"{counted(size, 'worker')} {_is(size)} more than --max-np {high}")
    room = capacity.worker_capacity(job)
    if size > max(room, job.target) and not job.may_get_hosts:
        offered = ", ".join(f"{host}:{count}" for host, count in _slots_by_host(job).items())
        return Declined(
            f"there is room for {counted(room, 'worker')} ({offered or 'no hosts'}), not for {size}; "
            "a job that is to grow needs --max-np, or hosts with more slots, at its start"
        )
    if size == (job.most if job.config.fills_slots else job.target):
        return Accepted(f"the job already has a target of {counted(size, 'worker')}")
    return Accepted(f"the job will have {size} workers instead of {job.target}")


def _drain(job: Job, host: str) -> Accepted | Declined:
    if _is_drained(job, host):
        return Accepted(f"host {host} is already drained")
    elsewhere = sum(each.host != host for each in capacity.slot_candidates(job))
    left = min(job.target, elsewhere)
    if left < job.config.min_np:
        return Declined(
            f"without host {host} there is room for {counted(left, 'worker')}, and the job needs "
            f"{job.config.min_np} (--min-np)"
        )
    going = [worker.name for worker in job.workers.values() if job.host_of(worker) == host]
    who = f"{listed(going)} will leave" if going else "no worker runs there"
    return Accepted(f"host {host} is being drained: {who}")


def _is_drained(job: Job, host: str) -> bool:
    return any(agent.is_draining for agent in job.agents.values() if agent.host == host)


def _slots_by_host(job: Job) -> dict[str, int]:
    """Return the slots of the hosts that were offered or have an agent, in the order of their ranks."""
    found = {agent.host: (agent.order, agent.slots) for agent in job.agents.values()}
    found |= {host: (offer.order, offer.slots) for host, offer in (job.offers or {}).items()}
    return {host: found[host][1] for host in sorted(found, key=lambda host: found[host][0])}


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


# The status of the job, for people and programs -----------------------------------------------------------------------

FOR_EVER = -1.0


def status_of(
    job: Job,
    now_s: float,
    steps: Mapping[str, int] = MappingProxyType({}),
    telemetry: Mapping[str, WorkerTelemetry] = MappingProxyType({}),
) -> Status:
    """Return the status of the job at `now_s`, by the coordinator's clock. It has no events, which the job does not
    keep.

    steps      by worker: the last seen number of decided steps
    telemetry  by worker: its last measurements
    """
    generation = job.generation
    members = job.survivors()
    ranks = {name: rank for rank, name in enumerate(generation.members if generation else ())}
    named = {worker.name for worker in members}
    others = [worker for worker in job.workers.values() if worker.name not in named]
    return Status(
        job=job.job_id,
        state=_state(job),
        generation=job.generation_number,
        change=job.change.number if job.change is not None and job.change.is_planned else 0,
        step=_step(job, [steps[name] for name in named if name in steps]),
        wanted=job.target,
        spares=job.spares,
        min_np=job.config.min_np,
        max_np=job.config.max_np,
        members=tuple(
            _worker(job, worker, ranks[worker.name], steps.get(worker.name), telemetry.get(worker.name))
            for worker in members
        ),
        newcomers=tuple(_worker(job, worker, None, None, telemetry.get(worker.name)) for worker in others),
        hosts=tuple(_hosts(job, now_s)),
        backoffs=tuple(_slots_in_backoff(job, now_s)),
        regroups=job.resets,
        coordinator_epoch=job.coordinator_epoch,
    )


@dataclass(frozen=True)
class JobSummary:
    """The status of a job in a few numbers, however many workers it has.

    Attributes:
        state: As in Status.
        step: The newest known step; None: none was reported.
        epoch, trained, samples: As in WorkerTelemetry, of the member that is furthest; zeros: no loader reports them.
        members: The number of members; before the first generation that of all workers.
        wanted: The number of workers that the job should have.
    """

    state: str
    step: int | None
    epoch: int
    trained: int
    samples: int
    members: int
    wanted: int


def summary_of(
    job: Job,
    steps: Mapping[str, int] = MappingProxyType({}),
    telemetry: Mapping[str, WorkerTelemetry] = MappingProxyType({}),
) -> JobSummary:
    """Return the summary of the job; `steps` and `telemetry` are as in status_of."""
    names = [worker.name for worker in job.survivors()]
    measured = [telemetry[name] for name in names if name in telemetry]
    epoch, trained, samples = max(((each.epoch, each.trained, each.samples) for each in measured), default=(0, 0, 0))
    return JobSummary(
        state=_state(job),
        step=_step(job, [steps[name] for name in names if name in steps]),
        epoch=epoch,
        trained=trained,
        samples=samples,
        members=len(names) if job.generation is not None else len(job.workers),
        wanted=job.target,
    )


def _state(job: Job) -> str:
    if job.ending is not None:
        return "ending"
    if job.is_released or job.is_finishing:
        return "finishing"
    if job.generation is None:
        return "starting"
    if not job.is_elastic and not job.static_because:
        return "setup"
    return "regrouping" if job.is_regrouping else "training"


def _step(job: Job, of_members: list[int]) -> int | None:
    """Return the newest known step; checkpoints count, too."""
    return max((*of_members, *(progress.step for progress in job.published.values())), default=None)


def _worker(
    job: Job, worker: Worker, rank: int | None, step: int | None, telemetry: WorkerTelemetry | None
) -> WorkerSummary:
    state = _member_state(job, worker) if rank is not None else _newcomer_state(worker)
    left = capacity.restarts_left(job, worker.slot)
    host, slot = job.host_of(worker), worker.slot.index
    return WorkerSummary(worker.name, rank, host, slot, worker.pid, state, left, step, telemetry)


def _member_state(job: Job, worker: Worker) -> str:
    if worker.raised is not None or worker.killed_for is not None:
        return "fails"
    if worker.is_leaving:
        return "leaves"
    return "has finished" if job.has_finished(worker) else "trains"


def _newcomer_state(worker: Worker) -> str:
    if worker.has_left or worker.is_leaving or worker.killed_for is not None or worker.raised is not None:
        return "ends"
    return "waits" if worker.is_elastic else "starts"


def _hosts(job: Job, now_s: float) -> list[HostStatus]:
    """Return the offered hosts, and the hosts that have an agent, in the order of their ranks."""
    offers = job.offers or {}
    workers = Counter(job.host_of(worker) for worker in job.workers.values())
    agents_on: defaultdict[str, list[AgentRecord]] = defaultdict(list)
    for agent in job.agents.values():
        agents_on[agent.host].append(agent)
    found = []
    for host in _slots_by_host(job):
        agents = agents_on[host]
        count = offers[host].slots if host in offers else sum(each.slots for each in agents if each.is_connected)
        ban = job.bans.get(host)
        found.append(
            HostStatus(
                host=host,
                slots=count,
                workers=workers[host],
                is_connected=any(agent.is_connected for agent in agents),
                is_drained=any(agent.is_draining for agent in agents),
                failures=ban.failures if ban else 0,
                out_for_s=_out_for_s(job, host, now_s),
            )
        )
    return found


def _slots_in_backoff(job: Job, now_s: float) -> list[SlotInBackoff]:
    return [
        SlotInBackoff(job.host(slot), slot.index, use.failures, use.backoff_until_s - now_s)
        for slot, use in sorted(job.slots.items())
        if use.is_open and use.backoff_until_s is not None and use.backoff_until_s > now_s
    ]


def _out_for_s(job: Job, host: str, now_s: float) -> float:
    if not job.is_banned(host):
        return 0.0
    until_s = job.bans[host].until_s
    return FOR_EVER if until_s is None else max(0.0, until_s - now_s)
