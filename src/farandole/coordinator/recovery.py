"""Recovery from the loss of a worker, up to the first step of the survivors: then a replacement may start. Pure.

The way of that step, from the workers to the start of the replacement:

    defer_restarts          a worker is lost: its slot stays empty for now (called by regroup.py)
    report_first_step       on each survivor, when its first step after the regroup is decided: it sends FirstStep
                            (worker/worker_recovery.py)
    record_first_step       the message arrives (called by worker_messages.py)
    conclude                all survivors have sent theirs: the deferral ends, and the recovery is reported
    slots.fill              in the same decision: the slot is not deferred any more, and gets its worker
"""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator.job import Change, Job, LostMember, Recovery, Worker
from farandole.coordinator.transition import Transition
from farandole.events import Recovered
from farandole.wire.messages import FirstStep


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


def record_first_step(transition: Transition, worker: Worker, message: FirstStep) -> None:
    """Record that a member has applied the first step of a generation."""
    recovery = transition.job.recovery
    if recovery is not None and message.number == recovery.number and transition.job.is_member(worker.name):
        transition.change(recovery=replace(recovery, steps={**recovery.steps, worker.name: message}))


def conclude(transition: Transition) -> None:
    """Conclude the recovery once all members have applied a step, or have finished without another one: report it, and
    permit replacements."""
    job, recovery = transition.job, transition.job.recovery
    if recovery is None or (job.change is not None and not job.change.is_planned):
        return  # Or the next fault has already happened.
    if any(not member.how for member in job.lost_members if member.worker in job.workers):
        return  # Its exit code will tell how it ended.
    if not all(worker.name in recovery.steps or job.has_finished(worker) for worker in job.survivors()):
        return
    transition.change(recovery=None, lost_members=(), lost_at=None)
    end_deferral(transition)
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


# The deferred restart -------------------------------------------------------------------------------------------------
#
# After a fault the survivors train first: the start of a replacement takes processor time and memory bandwidth from
# the step for which all members wait. The replacement is started as soon as all survivors have applied a step, mostly
# within milliseconds; or after `deferred_restart_s`, for long steps and for scripts that commit rarely; or at once if
# the job cannot continue without it.


def defer_restarts(transition: Transition) -> None:
    """Defer the replacement of lost workers after a fault. Further faults before the survivors train again do not
    extend the time: they may never stop."""
    if transition.job.restart_deferred_until_s is None and transition.job.config.deferred_restart_s:
        transition.change(restart_deferred_until_s=transition.now_s + transition.job.config.deferred_restart_s)


def end_deferral(transition: Transition) -> None:
    """End the deferral: the survivors train, or the time is over."""
    transition.change(restart_deferred_until_s=None)


def end_deferral_in_time(transition: Transition) -> None:
    """End the deferral when its time is over. Called whenever time may have passed."""
    until_s = transition.job.restart_deferred_until_s
    if until_s is not None and transition.now_s >= until_s:
        end_deferral(transition)


def defers_restarts(job: Job) -> bool:
    """Return whether lost workers are not replaced yet."""
    staying = sum(not worker.is_leaving for worker in job.survivors())
    return job.restart_deferred_until_s is not None and staying >= max(1, job.config.min_np)
