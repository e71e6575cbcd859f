"""The cost of a regroup, reported when all its members have applied a step and the exits of the lost ones are known.

The coordinator measures its own part: from the fault, or the first report of one, to START. The members measure the
rest, each by its own clock. The time of a worker's actual death is unknown to all of them.
"""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator import deferred_restart
from farandole.coordinator.job import Change, LostMember, Recovery, Worker
from farandole.coordinator.transition import Transition
from farandole.events import Recovered
from farandole.messages import FirstStep


def record_lost_member(transition: Transition, member: LostMember) -> None:
    """Record that a member is lost, or more details of a member recorded before."""
    known = {each.worker: each for each in transition.job.lost_members}
    if member.worker in known:
        member = replace(known[member.worker], how=member.how, last_lines=member.last_lines)
    transition.change(lost_members=tuple({**known, member.worker: member}.values()))


def started(transition: Transition, change: Change) -> None:
    """Record that a generation starts that replaces another one. If no member had got far in that one, both are one
    recovery."""
    recovery = Recovery(change.number, change.is_planned, change.reason, change.began_s, transition.now_s)
    before = transition.job.recovery
    if before is not None:
        recovery = replace(
            recovery,
            is_planned=before.is_planned and change.is_planned,
            reason=f"{before.reason}; {change.reason}",
            began_s=before.began_s,
        )
    transition.change(recovery=recovery)


def first_step(transition: Transition, worker: Worker, said: FirstStep) -> None:
    """Record that a member has applied the first step of a generation."""
    recovery = transition.job.recovery
    if recovery is not None and said.number == recovery.number and transition.job.is_member(worker.name):
        transition.change(recovery=replace(recovery, steps={**recovery.steps, worker.name: said}))


def tell_when_over(transition: Transition) -> None:
    """Report the recovery once all members have applied a step, or have finished without another one."""
    job, recovery = transition.job, transition.job.recovery
    if recovery is None or (job.change is not None and not job.change.is_planned):
        return  # Or the next fault has already happened.
    if any(not member.how for member in job.lost_members if member.worker in job.workers):
        return  # Its exit code will tell how it ended.
    if not all(worker.name in recovery.steps or job.has_finished(worker) for worker in job.survivors()):
        return
    transition.change(recovery=None, lost_members=(), lost_at=None)
    deferred_restart.end(transition)
    if recovery.steps:
        transition.log(_report(recovery, job.lost_members, job.lost_at))


def _report(recovery: Recovery, lost_members: tuple[LostMember, ...], lost_at: int | None) -> Recovered:
    def since_start_s(name: str) -> float:
        step = recovery.steps[name]
        return step.connected_s + step.synced_s + step.stepped_s

    slowest = max(recovery.steps, key=since_start_s)
    step = recovery.steps[slowest]
    regrouped_s = recovery.started_s - recovery.began_s
    silent_s = max((member.silent_s for member in lost_members), default=0.0)
    return Recovered(
        number=recovery.number,
        is_planned=recovery.is_planned,
        reason=recovery.reason,
        lost=tuple(f"{member.worker}, which {member.how}" for member in lost_members),
        noticed=tuple(dict.fromkeys(member.noticed for member in lost_members)),
        last_lines=tuple(line for member in lost_members for line in member.last_lines),
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
