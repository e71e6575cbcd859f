"""The judgement of the user's requests: whether one can be executed, and why not. Pure; clients.py asks before anything
is decided."""

from __future__ import annotations

from farandole.control import Accepted, AskDrain, AskScale, AskUndrain, Declined
from farandole.coordinator import capacity, formatting
from farandole.coordinator.inputs import DrainRequested, Input, ScaleRequested, UndrainRequested
from farandole.coordinator.job import Job


def judge(job: Job, asked: AskScale | AskDrain | AskUndrain) -> tuple[Accepted | Declined, Input | None]:
    """Return the answer, and the input to decide: None if the request is refused, or fulfilled already."""
    reason = _why_not_now(job)
    if reason is not None:
        return Declined(reason), None
    match asked:
        case AskScale(size):
            return _scale(job, size)
        case AskDrain(host):
            return _drain(job, host)
        case AskUndrain(host):
            return _undrain(job, host)


def _why_not_now(job: Job) -> str | None:
    if job.ending is not None:
        return f"the job is ending: {job.ending.reason}"
    if job.is_released or job.is_finishing:
        return "the training is at its end"
    if job.generation is None:
        return "the job is starting: not all of its workers have called init() yet; ask again when it trains"
    if not job.is_elastic:
        return "no worker has entered an elastic function: the workers of a static script cannot come and go"
    return None


def _scale(job: Job, size: int) -> tuple[Accepted | Declined, Input | None]:
    low, high = job.config.min_np, job.config.max_np
    if size < low:
        return Declined(f"{formatting.counted(size, 'worker')} {_is(size)} fewer than --min-np {low}"), None
    if high is not None and size > high:
        return Declined(f"{formatting.counted(size, 'worker')} {_is(size)} more than --max-np {high}"), None
    room = capacity.worker_capacity(job)
    if size > max(room, job.target) and not job.may_get_hosts:
        offered = ", ".join(f"{host}:{slots}" for host, slots in _slots_by_host(job).items())
        return Declined(
            f"there is room for {formatting.counted(room, 'worker')} ({offered or 'no hosts'}), not for {size}; "
            "start a job that is to grow with --max-np, or with hosts that have more slots"
        ), None
    if size == (job.most if job.config.fills_slots else job.target):
        return Accepted(f"the job is to have {formatting.counted(size, 'worker')} already"), None
    return Accepted(f"the job will have {size} workers instead of {job.target}"), ScaleRequested(size)


def _drain(job: Job, host: str) -> tuple[Accepted | Declined, Input | None]:
    if refused := _unknown(job, host):
        return refused, None
    if _is_drained(job, host):
        return Accepted(f"host {host} is drained already"), None
    elsewhere = sum(each.host != host for each in capacity.slot_candidates(job))
    left = min(job.target, elsewhere)
    if left < job.config.min_np:
        return Declined(
            f"without host {host} there is room for {formatting.counted(left, 'worker')}, and the job needs "
            f"{job.config.min_np} (--min-np)"
        ), None
    going = [worker.name for worker in job.workers.values() if job.host_of(worker) == host]
    who = f"{formatting.listed(going)} will leave" if going else "no worker runs there"
    return Accepted(f"host {host} is being drained: {who}"), DrainRequested(host, "asked by a person")


def _undrain(job: Job, host: str) -> tuple[Accepted | Declined, Input | None]:
    if refused := _unknown(job, host):
        return refused, None
    if not _is_drained(job, host):
        return Declined(f"host {host} is not drained"), None
    return Accepted(f"host {host} may be used again"), UndrainRequested(host)


def _unknown(job: Job, host: str) -> Declined | None:
    known = list(_slots_by_host(job))
    if host in known:
        return None
    return Declined(f"the job has no host {host!r}; its hosts: {formatting.listed(known)}")


def _is_drained(job: Job, host: str) -> bool:
    return any(agent.is_draining for agent in job.agents.values() if agent.host == host)


def _slots_by_host(job: Job) -> dict[str, int]:
    """Return the slots of the hosts that were offered or have an agent."""
    slots = {agent.host: agent.slots for agent in job.agents.values()}
    return slots | {host: offer.slots for host, offer in (job.offers or {}).items()}


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
