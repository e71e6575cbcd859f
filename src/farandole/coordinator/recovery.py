"""What a regroup has cost, told when all its members have applied a step, and it is known how the lost ones ended.

The coordinator knows its own part: from the fault, or what it first heard of one, to START. The rest the members say,
each by its own clock. When a worker really died nobody can know who was not there.
"""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator import survivors_first
from farandole.coordinator.draft import Draft
from farandole.coordinator.job import Change, Recovery, Victim, Worker
from farandole.events import Recovered
from farandole.messages import FirstStep


def note_victim(draft: Draft, victim: Victim) -> None:
    """A member is lost; or more is known of one that was noted before."""
    known = {each.worker: each for each in draft.job.victims}
    if victim.worker in known:
        victim = replace(known[victim.worker], how=victim.how, last_lines=victim.last_lines)
    draft.change(victims=tuple({**known, victim.worker: victim}.values()))


def started(draft: Draft, change: Change) -> None:
    """A generation that replaces another one starts. If nobody came far in that, both are one recovery."""
    recovery = Recovery(change.number, change.is_planned, change.reason, change.began_s, draft.now_s)
    before = draft.job.recovery
    if before is not None:
        recovery = replace(
            recovery,
            is_planned=before.is_planned and change.is_planned,
            reason=f"{before.reason}; {change.reason}",
            began_s=before.began_s,
        )
    draft.change(recovery=recovery)


def first_step(draft: Draft, worker: Worker, said: FirstStep) -> None:
    """A member has applied the first step of a generation."""
    recovery = draft.job.recovery
    if recovery is not None and said.number == recovery.number and draft.job.is_member(worker.name):
        draft.change(recovery=replace(recovery, steps={**recovery.steps, worker.name: said}))


def tell_when_over(draft: Draft) -> None:
    """All members have applied a step, or have finished without another one."""
    job, recovery = draft.job, draft.job.recovery
    if recovery is None or (job.change is not None and not job.change.is_planned):
        return  # Or the next fault is there already.
    if any(not victim.how for victim in job.victims if victim.worker in job.workers):
        return  # Its exit will say how.
    if not all(worker.name in recovery.steps or job.has_finished(worker) for worker in job.survivors()):
        return
    draft.change(recovery=None, victims=(), lost_at=None)
    survivors_first.end(draft)
    if recovery.steps:
        draft.log(_report(recovery, job.victims, job.lost_at))


def _report(recovery: Recovery, victims: tuple[Victim, ...], lost_at: int | None) -> Recovered:
    def since_start_s(name: str) -> float:
        step = recovery.steps[name]
        return step.connected_s + step.synced_s + step.stepped_s

    slowest = max(recovery.steps, key=since_start_s)
    step = recovery.steps[slowest]
    regrouped_s = recovery.started_s - recovery.began_s
    silent_s = max((victim.silent_s for victim in victims), default=0.0)
    return Recovered(
        number=recovery.number,
        is_planned=recovery.is_planned,
        reason=recovery.reason,
        lost=tuple(f"{victim.worker}, which {victim.how}" for victim in victims),
        noticed=tuple(dict.fromkeys(victim.noticed for victim in victims)),
        last_lines=tuple(line for victim in victims for line in victim.last_lines),
        total_ms=_ms(silent_s + regrouped_s + since_start_s(slowest)),
        silent_ms=_ms(silent_s),
        ready_ms=_ms(regrouped_s),
        connected_ms=_ms(step.connected_s),
        synced_ms=_ms(step.synced_s),
        first_step_ms=_ms(step.stepped_s),
        slowest=slowest,
        steps_redone=max(each.steps_redone for each in recovery.steps.values()),
        samples_redone=max(each.samples_redone for each in recovery.steps.values()),
        counts=step.counts,
        began_at=step.began_at,
        lost_at=lost_at,
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
