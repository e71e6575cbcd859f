"""The bootstrap, from the first agent to generation 1: all workers call init(), then they start together. Pure."""

from __future__ import annotations

from farandole.base.events.job_events import WorkersNeverMet
from farandole.job.coordinator import capacity
from farandole.job.coordinator.job import Job, Worker
from farandole.job.coordinator.regroup import start
from farandole.job.coordinator.sentences import counted, listed, why_not_refilled, worker_name
from farandole.job.coordinator.transition import Transition


def advance_bootstrap(transition: Transition) -> None:
    """Start generation 1 once all workers wait in init(), or detect that it cannot start."""
    job = transition.job
    waiting = [worker for worker in job.newcomers() if worker.address is not None]
    _report_never_met(transition)
    if job.plain_exits and not job.workers and not _awaits_hosts(job):
        how = ""
        if not job.has_met:  # else in a process group of torch.distributed
            how = f"; none of them called init(){' or torch.distributed.init_process_group()' if job.alone else ''}"
        transition.end(0, f"All workers exited with code 0{how}.")
    elif job.plain_exits and waiting:
        who = f"{listed(worker.name for worker in waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        transition.end(
            1,
            f"{who} in init(), but {listed(job.plain_exits)} exited with code 0 "
            "without calling it: either all workers of a job call init(), or none.",
        )
    elif job.target == 0 and not job.config.fills_slots:
        transition.end(1, "All workers were asked to leave before training began.")
    elif _can_never_start(job):
        needed = counted(job.config.num_proc, "worker")
        transition.end(1, f"Training cannot begin with {needed} (-np): {why_not_refilled(job)}.")
    elif len(waiting) == job.target and _has_slots(job):
        transition.change(start_deadline_s=None)
        start(transition, sorted(waiting, key=job.slot_order))
    else:
        _watch_the_clock(transition, waiting)


def _report_never_met(transition: Transition) -> None:
    """Report workers that have ended while others wait in a process group of torch.distributed, which notices nothing
    until its timeout of half an hour. Once for each."""
    job = transition.job
    waiting = tuple(name for name, worker in job.workers.items() if worker.has_met and worker.address is None)
    if job.never_met and waiting:
        transition.change(never_met=())
        transition.log(WorkersNeverMet(job.never_met, waiting))


def _awaits_hosts(job: Job) -> bool:
    """Return whether workers are still to be started on offered hosts, whose agents have not joined yet."""
    return not _has_slots(job) and any(each.slot is None for each in capacity.slot_candidates(job))


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
        start(transition, sorted(waiting, key=job.slot_order))
    else:
        transition.end(1, _too_late(job, waiting))


def _has_slots(job: Job) -> bool:
    """Return whether there are slots for all workers with which training begins."""
    return capacity.open_slots(job) >= job.needed_at_start


def _can_never_start(job: Job) -> bool:
    """Return whether too many hosts are banned permanently."""
    needed = job.config.num_proc if job.config.fills_slots else job.target
    return any(map(job.is_banned, job.bans)) and capacity.worker_capacity(job) < needed and not job.may_get_slots()


def _too_late(job: Job, waiting: list[Worker]) -> str:
    silent = [worker_name(job, worker) for worker in job.newcomers() if worker.address is None]
    reasons = []
    if silent:
        reasons.append(f"{listed(silent)} did not call init()")
    if not _has_slots(job):
        reasons.append(why_not_refilled(job))
    return (
        f"{len(waiting)} of {counted(job.needed_at_start, 'worker')} waited in init() for "
        f"{job.config.start_timeout_s:g} s (--start-timeout): {'; '.join(reasons)}."
    )
