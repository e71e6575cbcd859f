"""From the first agent to generation 1: all workers call init(), then they start together."""

from __future__ import annotations

from farandole.coordinator import regroup, words
from farandole.coordinator.draft import Draft
from farandole.coordinator.job import Job, Worker


def advance(draft: Draft) -> None:
    """Start generation 1 once all workers wait in init(), or find out that it cannot start."""
    job = draft.job
    waiting = [worker for worker in job.newcomers() if worker.address is not None]
    if job.plain_exits and not job.workers:
        draft.end(0, "All workers exited with code 0; none of them called init().")
    elif job.plain_exits and waiting:
        draft.end(
            1,
            f"{_are_waiting(waiting)} in init(), but {words.listed(job.plain_exits)} exited with code 0 "
            "without calling it: either all workers of a job call init(), or none.",
        )
    elif job.target == 0:
        draft.end(1, "All workers were asked to leave before training began.")
    elif len(waiting) == job.target:
        draft.change(start_deadline_s=None)
        regroup.start(draft, sorted(waiting, key=job.slot_order))
    else:
        _watch_the_clock(draft, waiting)


def _watch_the_clock(draft: Draft, waiting: list[Worker]) -> None:
    """A plain script may run for hours without init(); but once one worker waits, the others must come."""
    job = draft.job
    lacks_slots = bool(job.agents) and sum(use.is_open for use in job.slots.values()) < job.target
    if not (waiting or lacks_slots):
        draft.change(start_deadline_s=None)
    elif job.start_deadline_s is None:
        draft.change(start_deadline_s=draft.now_s + job.config.start_timeout_s)
    elif draft.now_s >= job.start_deadline_s:
        draft.end(1, _too_late(job, waiting))


def _too_late(job: Job, waiting: list[Worker]) -> str:
    silent = [words.worker_name(job, worker) for worker in job.newcomers() if worker.address is None]
    reasons = []
    if silent:
        reasons.append(f"{words.listed(silent)} did not call init()")
    if sum(use.is_open for use in job.slots.values()) < job.target:
        reasons.append(words.why_not_refilled(job))
    return (
        f"{len(waiting)} of {words.counted(job.target, 'worker')} waited in init() for "
        f"{job.config.start_timeout_s:g} s (--start-timeout): {'; '.join(reasons)}."
    )


def _are_waiting(waiting: list[Worker]) -> str:
    return f"{words.listed(worker.name for worker in waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
