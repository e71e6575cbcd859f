"""The bootstrap, from the first agent to generation 1: all workers call init(), then they start together."""

from __future__ import annotations

from farandole.coordinator import capacity, formatting, regroup
from farandole.coordinator.job import Job, Worker
from farandole.coordinator.transition import Transition


def advance(transition: Transition) -> None:
    """Start generation 1 once all workers wait in init(), or detect that it cannot start."""
    job = transition.job
    waiting = [worker for worker in job.newcomers() if worker.address is not None]
    if job.plain_exits and not job.workers:
        transition.end(0, "All workers exited with code 0; none of them called init().")
    elif job.plain_exits and waiting:
        transition.end(
            1,
            f"{_are_waiting(waiting)} in init(), but {formatting.listed(job.plain_exits)} exited with code 0 "
            "without calling it: either all workers of a job call init(), or none.",
        )
    elif job.target == 0 and not job.config.fills_slots:
        transition.end(1, "All workers were asked to leave before training began.")
    elif _can_never_start(job):
        needed = formatting.counted(job.config.num_proc, "worker")
        transition.end(1, f"Training cannot begin with {needed} (-np): {formatting.why_not_refilled(job)}.")
    elif len(waiting) == job.target and _has_slots(job):
        transition.change(start_deadline_s=None)
        regroup.start(transition, sorted(waiting, key=job.slot_order))
    else:
        _watch_the_clock(transition, waiting)


def _watch_the_clock(transition: Transition, waiting: list[Worker]) -> None:
    """Keep the deadline for the start. A plain script may run for hours without init(); but once one worker waits, the
    others must come in time."""
    job = transition.job
    lacks_slots = (bool(job.agents) or job.offers is not None) and not _has_slots(job)
    if not (waiting or lacks_slots):
        transition.change(start_deadline_s=None)
    elif job.start_deadline_s is None:
        transition.change(start_deadline_s=transition.now_s + job.config.start_timeout_s)
    elif transition.now_s < job.start_deadline_s:
        return
    elif job.config.fills_slots and len(waiting) >= job.config.num_proc:
        transition.change(start_deadline_s=None)
        regroup.start(transition, sorted(waiting, key=job.slot_order))
    else:
        transition.end(1, _too_late(job, waiting))


def _has_slots(job: Job) -> bool:
    """Return whether there are slots for all workers with which training begins."""
    needed = max(job.target, job.config.num_proc) if job.config.fills_slots else job.target
    return sum(use.is_open for use in job.slots.values()) >= needed


def _can_never_start(job: Job) -> bool:
    """Return whether too many hosts are banned permanently."""
    needed = job.config.num_proc if job.config.fills_slots else job.target
    return any(map(job.is_banned, job.bans)) and capacity.worker_capacity(job) < needed and not job.may_get_slots()


def _too_late(job: Job, waiting: list[Worker]) -> str:
    silent = [formatting.worker_name(job, worker) for worker in job.newcomers() if worker.address is None]
    reasons = []
    if silent:
        reasons.append(f"{formatting.listed(silent)} did not call init()")
    if not _has_slots(job):
        reasons.append(formatting.why_not_refilled(job))
    needed = max(job.target, job.config.num_proc) if job.config.fills_slots else job.target
    return (
        f"{len(waiting)} of {formatting.counted(needed, 'worker')} waited in init() for "
        f"{job.config.start_timeout_s:g} s (--start-timeout): {'; '.join(reasons)}."
    )


def _are_waiting(waiting: list[Worker]) -> str:
    return f"{formatting.listed(worker.name for worker in waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
