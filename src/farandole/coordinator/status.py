"""The status of the job, for people and programs: a Status of what the coordinator knows. Pure; clients.py sends it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from farandole.control import HostStatus, SlotInBackoff, Status, WorkerStatus
from farandole.coordinator import slots
from farandole.coordinator.job import Job, Worker

FOR_EVER = -1.0


def describe(job: Job, now_s: float, steps: Mapping[str, int] = MappingProxyType({})) -> Status:
    """Return the status of the job at `now_s`, by the coordinator's clock. It has no events, which the job does not
    keep.

    steps  by worker: the last seen number of decided steps
    """
    generation = job.generation
    members = job.survivors()
    ranks = {name: rank for rank, name in enumerate(generation.members if generation else ())}
    named = {worker.name for worker in members}
    others = [worker for worker in job.workers.values() if worker.name not in named]
    is_planned = job.change is not None and job.change.is_planned
    return Status(
        job=job.job_id,
        state=_state(job),
        generation=generation.number if generation else 0,
        change=job.change.number if job.change is not None and is_planned else 0,
        step=_step(job, [steps[name] for name in named if name in steps]),
        wanted=job.target,
        spares=job.spares,
        min_np=job.config.min_np,
        max_np=job.config.max_np,
        members=tuple(_worker(job, worker, ranks[worker.name], steps.get(worker.name)) for worker in members),
        newcomers=tuple(_worker(job, worker, None, None) for worker in others),
        hosts=tuple(_hosts(job, now_s)),
        backoffs=tuple(_slots_in_backoff(job, now_s)),
        regroups=job.resets,
    )


def _state(job: Job) -> str:
    if job.ending is not None:
        return "ending"
    if job.is_released or job.is_finishing:
        return "finishing"
    if job.generation is None:
        return "starting"
    return "training" if job.change is None or job.change.is_planned else "regrouping"


def _step(job: Job, of_members: list[int]) -> int | None:
    """Return the newest known step; checkpoints count, too."""
    return max((*of_members, *(progress.step for progress in job.published.values())), default=None)


def _worker(job: Job, worker: Worker, rank: int | None, step: int | None) -> WorkerStatus:
    state = _member_state(job, worker) if rank is not None else _newcomer_state(worker)
    left = slots.restarts_left(job, worker.slot)
    return WorkerStatus(worker.name, rank, job.host_of(worker), worker.slot.index, worker.pid, state, left, step)


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
    order = {agent.host: agent.order for agent in job.agents.values()} | {h: offer.order for h, offer in offers.items()}
    found = []
    for host in sorted(order, key=lambda host: order[host]):
        agents = [agent for agent in job.agents.values() if agent.host == host]
        count = offers[host].slots if host in offers else sum(each.slots for each in agents if each.is_connected)
        ban = job.bans.get(host)
        found.append(
            HostStatus(
                host=host,
                slots=count,
                workers=sum(job.host_of(worker) == host for worker in job.workers.values()),
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
