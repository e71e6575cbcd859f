"""Backoff: a broken device must not cost the others a regroup every few seconds. Pure.

A healthy worker is always replaced at once: a worker that lived for HEALTHY_S inside its elastic function, or that held
the state and was killed by SIGKILL, which its own code never does. The first unhealthy worker is replaced at once, too.
From the second in a row on the slot stays empty for FIRST_BACKOFF_S, then for twice as long with each further one, up
to LONGEST_BACKOFF_S.
"""

from __future__ import annotations

import signal

from farandole.base.events.worker_events import SlotBackoff
from farandole.job.coordinator.job import Job, Worker
from farandole.job.coordinator.transition import Transition

HEALTHY_S = 1.0
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


def backoff_s(failures: int) -> float:
    """Return how long, in seconds, a slot stays empty after this many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 2, 30))


def count_failure(transition: Transition, worker: Worker, exit_code: int | None) -> None:
    """Count the loss of a slot's worker that was not asked to leave. A failure of the host does not count against the
    slot."""
    job, slot = transition.job, worker.slot
    use = job.slots.get(slot)
    if use is None or not use.is_open or not job.agents[slot.agent].is_connected:
        return
    if _was_healthy(worker, exit_code, transition.now_s):
        transition.change_slot(slot, failures=0)
        return
    failures = use.failures + 1
    transition.change_slot(slot, failures=failures)
    if (pause := backoff_s(failures)) and use.restarts < job.config.restarts:
        transition.change_slot(slot, backoff_until_s=transition.now_s + pause)
        transition.log(SlotBackoff(slot.index, job.host(slot), failures, pause))


def _was_healthy(worker: Worker, exit_code: int | None, now_s: float) -> bool:
    if worker.elastic_s is None:
        return False
    was_killed = exit_code == -signal.SIGKILL and not worker.killed_for
    return now_s - worker.elastic_s >= HEALTHY_S or (was_killed and worker.synced > 0)


def end_backoffs(transition: Transition) -> None:
    """Let slots be filled again whose backoff is over."""
    for slot, use in transition.job.slots.items():
        if use.backoff_until_s is not None and transition.now_s >= use.backoff_until_s:
            transition.change_slot(slot, backoff_until_s=None)


def backoff_deadline(job: Job) -> float | None:
    """Return when the next slot may be filled again."""
    return min((use.backoff_until_s for use in job.slots.values() if use.backoff_until_s is not None), default=None)
