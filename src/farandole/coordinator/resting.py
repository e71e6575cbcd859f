"""Slots whose workers fail again and again sit out for a while: a broken device must not cost the others a regroup
every few seconds. Pure.

A healthy worker is replaced at once, however often: one that lived for HEALTHY_S inside its elastic function, or that
held the state and was killed by SIGKILL, which no code of its own does. The first one that is not is replaced at once,
too; from the second one in a row on its slot stays empty for FIRST_S, then for twice as long with each further one, up
to LONGEST_S.
"""

from __future__ import annotations

import signal

from farandole.coordinator.draft import Draft
from farandole.coordinator.job import Job, Worker
from farandole.events import SlotRests

HEALTHY_S = 1.0
FIRST_S = 1.0
LONGEST_S = 60.0


def pause_s(failures: int) -> float:
    """How long a slot stays empty after so many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 2, 30))


def worker_lost(draft: Draft, worker: Worker, exit_code: int | None) -> None:
    """The slot's worker is gone, and nobody asked it to go. What its host did is not the slot's fault."""
    job, slot = draft.job, worker.slot
    use = job.slots.get(slot)
    if use is None or not use.is_open or not job.agents[slot.agent].is_connected:
        return
    if _was_healthy(worker, exit_code, draft.now_s):
        draft.change_slot(slot, failures=0)
        return
    failures = use.failures + 1
    draft.change_slot(slot, failures=failures)
    if (pause := pause_s(failures)) and use.restarts < job.config.restarts:
        draft.change_slot(slot, rests_until_s=draft.now_s + pause)
        draft.log(SlotRests(slot.index, job.host(slot), failures, pause))


def _was_healthy(worker: Worker, exit_code: int | None, now_s: float) -> bool:
    if worker.elastic_s is None:
        return False
    was_killed = exit_code == -signal.SIGKILL and not worker.killed_for
    return now_s - worker.elastic_s >= HEALTHY_S or (was_killed and worker.synced > 0)


def let_back(draft: Draft) -> None:
    """Slots whose time is over may be filled again."""
    for slot, use in draft.job.slots.items():
        if use.rests_until_s is not None and draft.now_s >= use.rests_until_s:
            draft.change_slot(slot, rests_until_s=None)


def deadline(job: Job) -> float | None:
    """When the next slot may be filled again."""
    return min((use.rests_until_s for use in job.slots.values() if use.rests_until_s is not None), default=None)
