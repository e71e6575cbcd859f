"""The change from one generation to the next: ABORT or PREPARE, all READY, START. It serves all membership changes.
Pure.

A fault ends the running generation at once (`abort`). A change without a fault, such as a worker that joins or leaves,
waits for a boundary (`_plan`). Either way the next generation starts when every survivor has sent READY for its number
(`_try_start`), with the workers that are wanted at that moment; no worker that answered is left waiting. The first
generation starts when all workers wait in init() (`advance_bootstrap`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from farandole.base.events.event import MOST_NAMED
from farandole.base.events.generation_events import (
    ChangePlanned,
    GenerationStarted,
    Recovered,
    RegroupBegan,
    TooFewWorkers,
)
from farandole.base.events.job_events import StateLost, TrainingCutShort
from farandole.base.membership import GenerationId
from farandole.base.wire.link_messages import Abort, FirstStep, Left, Prepare, Start
from farandole.base.wire.messages import StartWorkers
from farandole.job.coordinator import capacity
from farandole.job.coordinator.job import Change, Generation, Job, LinkTrouble, Loss, Recovery, Worker
from farandole.job.coordinator.sentences import counted, listed, why_not_refilled
from farandole.job.coordinator.transition import Transition

# The effect of a planned change on the membership, in Horovod's numbers; their sum for both.
_REMOVED, _ADDED = 1, 2

# Every agent gets the reason of each regroup, in characters; faults beyond that are in the log only.
_LONGEST_REASON = 2000


def abort(transition: Transition, reason: str) -> None:
    """End the running generation after a fault, or the regroup under way, with a number that all must answer."""
    old, number = transition.job.change, transition.job.number + 1
    change = Change(number, is_planned=False, began_s=transition.now_s, reason=reason)
    if old is not None and not old.is_planned:
        reasons = f"{old.reason}; {reason}" if len(old.reason) < _LONGEST_REASON else old.reason
        change = replace(change, began_s=old.began_s, reason=reasons, short_since_s=old.short_since_s)
    transition.change(number=number, change=change)
    defer_restarts(transition)
    transition.change(links=LinkTrouble(retries=transition.job.links.retries))
    survivors = tuple(worker.name for worker in transition.job.survivors())
    transition.send_to_workers(survivors, Abort(number, reason))
    transition.log(RegroupBegan(number, reason, survivors))


def abort_for_faults(transition: Transition) -> None:
    """End the running generation if the inputs contained faults: once, however many there were."""
    if transition.faults:
        faults, transition.faults = transition.faults, []
        left_out = len(faults) - MOST_NAMED
        abort(transition, "; ".join(faults[:MOST_NAMED]) + (f"; and {left_out} more" if left_out > 0 else ""))


def end_if_hopeless(transition: Transition) -> None:
    """End a job in which no further generation can ever start."""
    losses, has_survivor = transition.job.losses_now(), any(transition.job.each_survivor())
    if losses and not has_survivor and all(loss.exit_code == 0 for loss in losses):
        transition.log(TrainingCutShort())
        transition.end(
            0,
            "All workers exited with code 0 before the elastic function had returned: the script caught an exception "
            "that left it, or called sys.exit().",
        )
        return
    if is_state_lost(transition.job) and transition.job.has_checkpoint and not _is_end_of_all(transition.job):
        resume_from_checkpoint(transition)
    reason = _why_hopeless(transition.job)
    if reason is not None:
        transition.end(1, reason)


def awaits_exits(job: Job) -> bool:
    """Return whether workers are dying without which the job cannot continue: their exits will tell how they ended."""
    return any(not loss.how for loss in job.losses_now()) and (is_state_lost(job) or not any(job.each_survivor()))


def advance(transition: Transition) -> None:
    """Plan a change if one is wanted, and start the next generation if all its members are ready."""
    if transition.job.change is None:
        _plan(transition)
    limit = transition.job.config.reset_limit
    if transition.job.change is not None and limit is not None and transition.job.resets >= limit:
        transition.end(1, f"The job was reset more often than --reset-limit {limit} allows.")
    elif transition.job.change is not None:
        _stop_waiting_in_time(transition)
        _try_start(transition, transition.job.change)


def wanted_members(job: Job) -> list[Worker]:
    """Return the members of the next generation, by rank, as far as is known now."""
    survivors = job.survivors()
    staying = job.staying()
    sources = _leaving_sources(job, survivors)
    if sources and _is_state_wanted(job, staying):
        staying = [worker for worker in survivors if not worker.is_leaving or worker.name in sources]
    if job.is_finishing and len(staying) >= job.config.min_np:
        return staying
    most = capacity.most_members(job)
    if most is None:
        return [*staying, *job.candidates()]
    if len(staying) == 1 and staying[0].is_leaving:
        most = max(most, 2)  # else there would be no room for the worker that receives the state
    return [*staying, *capacity.choose_newcomers(job, staying, most - len(staying))]


def start(transition: Transition, members: Sequence[Worker]) -> None:
    """Send START: give every member its place and its neighbours in the next generation."""
    job = transition.job
    change = job.change or Change(job.number + 1, is_planned=True, began_s=transition.now_s, reason="the job begins")
    number = change.number
    id = GenerationId(job.run_id, job.coordinator_epoch, number, f"{job.job_id}-{number}")
    addresses = [(worker.name, worker.address) for worker in members]
    places = capacity.placements(
        [(job.host_of(worker), capacity.number_on_host(job, worker.slot)) for worker in members]
    )
    neighbours = capacity.ring_neighbours([(name, address) for name, address in addresses if address is not None])
    starts: defaultdict[str, dict[str, Start]] = defaultdict(dict)
    for worker, place, (previous, next) in zip(members, places, neighbours, strict=True):
        starts[worker.slot.agent][worker.name] = Start(id, place, previous, next, bootstrap=not job.was_synced)
    for agent, of_agent in starts.items():
        transition.send(agent, StartWorkers(of_agent))
    names = tuple(worker.name for worker in members)
    if job.generation is not None:
        _begin_recovery(transition, change)
    transition.change(number=number, generation=Generation(id, names), change=None)
    transition.change(links=LinkTrouble(retries=job.links.retries), resets=job.resets + (job.generation is not None))
    transition.log(GenerationStarted(number, names, not job.was_synced, transition.now_s - change.began_s))


def shortage_deadline(job: Job) -> float | None:
    """Return when a job that has too few workers gives up."""
    if job.change is None or job.change.short_since_s is None:
        return None
    return job.change.short_since_s + job.config.elastic_timeout_s


def newcomers_deadline(job: Job) -> float | None:
    """Return when members that wait for newcomers continue without those that are not ready."""
    if job.change is None or not job.change.is_planned or not _awaited(job):
        return None
    return job.change.began_s + job.config.start_timeout_s


def lease_deadline(job: Job) -> float | None:
    """Return when a job without survivors may begin anew."""
    return job.lease_end_s if job.change is not None and not any(job.each_survivor()) else None


def _may_go_on_elsewhere(transition: Transition) -> bool:
    """Return whether the whole old generation was lost with hosts that may only be cut off. Two jobs would then train
    until the lease of the lost workers is over. Surviving members prevent this: the workers that are cut off cannot
    train without them."""
    job = transition.job
    if job.lease_end_s is not None and transition.now_s >= job.lease_end_s:
        transition.change(lease_end_s=None)
    return transition.job.lease_end_s is not None and not job.survivors()


def _awaited(job: Job) -> list[Worker]:
    """Return the newcomers that the members wait for. A spare that came before one of them has taken its place."""
    is_full = job.config.spares and len(wanted_members(job)) >= (capacity.most_members(job) or 0)
    return [] if is_full else job.awaited()


def _leaving_sources(job: Job, survivors: Sequence[Worker]) -> set[str]:
    """Return the workers that are to leave and must transfer the state first: they stay until another one has it.

    A worker whose last sync was in an earlier generation may lack steps that the holders of the newest one have. If the
    last generation ended before any survivor had its state, holders may differ by a step: all of them are needed.
    """
    newest = max((worker.synced for worker in survivors), default=0)
    holders = [worker for worker in survivors if worker.synced == newest > 0]
    if not job.was_synced or job.generation is None:
        return set()
    if newest < job.generation.id.number:
        return {worker.name for worker in holders if worker.is_leaving}
    return {worker.name for worker in holders[:1]} if all(worker.is_leaving for worker in holders) else set()


def _is_state_wanted(job: Job, staying: Sequence[Worker]) -> bool:
    """Return whether a worker exists, or may come, to which the leaving workers could transfer the state."""
    if staying or job.newcomers() or job.is_refill_due():
        return True
    return job.may_get_slots() and not all(worker.was_asked for worker in job.survivors())


def _plan(transition: Transition) -> None:
    """Announce a generation with the workers that came, without the workers that leave, at the members' next boundary.
    It includes the expected workers, too, where members wait for newcomers.

    Only members inside an elastic function agree on boundaries; members that have finished do not.
    """
    job = transition.job
    members = job.survivors()
    if any(not worker.is_elastic or job.has_finished(worker) for worker in members):
        return
    wanted = wanted_members(job)
    joining = _missing_from(members, [*wanted, *_awaited(job)])
    leaving = _missing_from(wanted, members)
    if not joining and not leaving:
        return
    does = [
        f"{listed(who)} {verb}{'s' if len(who) == 1 else ''}"
        for who, verb in ((joining, "join"), (leaving, "leave"))
        if who
    ]
    number, reason = job.number + 1, ", ".join(does)
    transition.change(number=number, change=Change(number, is_planned=True, began_s=transition.now_s, reason=reason))
    update = (_REMOVED if leaving else 0) | (_ADDED if joining else 0)
    transition.send_to_workers((worker.name for worker in members), Prepare(number, reason, update))
    transition.log(ChangePlanned(number, reason))


def _try_start(transition: Transition, change: Change) -> None:
    survivors = transition.job.survivors()
    busy = [worker for worker in survivors if worker.ready != change.number]
    if busy:
        if not change.is_planned:
            _record_shortage(transition, change)
        elif len(busy) < len(survivors) and all(transition.job.has_finished(worker) for worker in busy):
            # The ready ones wait for START, the others wait for them to finish: only a fault resolves it.
            abort(transition, f"{listed(worker.name for worker in busy)} finished before the planned boundary")
        return
    if change.is_planned and _awaited(transition.job):
        if change.short_since_s is not None:
            _record_shortage(transition, change)
        return  # Every member waits, too; but not without limit.
    wanted = wanted_members(transition.job)
    going = _missing_from(wanted, survivors)
    transition.send_to_workers(going, Left())
    for name in going:
        transition.change_worker(name, has_left=True)
    if not wanted and going and not (transition.job.newcomers() or transition.job.is_refill_due()):
        transition.end(1, f"The last worker left ({listed(going)}) before the training was finished.")
        return
    capacity.release_held_back(transition)
    if _may_go_on_elsewhere(transition):
        return
    if len(wanted) < transition.job.config.min_np and transition.job.may_have() < transition.job.config.min_np:
        capacity.free_workers(transition)
    if wanted and len(wanted) >= transition.job.config.min_np:
        start(transition, wanted)
    else:
        _record_shortage(transition, change)


def _stop_waiting_in_time(transition: Transition) -> None:
    """Stop waiting for newcomers that take too long. They are announced like any other when they are ready."""
    deadline_s = newcomers_deadline(transition.job)
    if deadline_s is not None and transition.now_s >= deadline_s:
        for worker in _awaited(transition.job):
            transition.change_worker(worker.name, is_awaited=False)


def _missing_from(some: Sequence[Worker], others: Sequence[Worker]) -> list[str]:
    names = {worker.name for worker in some}
    return [worker.name for worker in others if worker.name not in names]


def _record_shortage(transition: Transition, change: Change) -> None:
    """Begin to wait for more workers, or give up waiting."""
    config = transition.job.config
    staying = len(transition.job.staying())
    present = staying if staying >= config.min_np else len(wanted_members(transition.job))
    if present >= config.min_np:
        if change.short_since_s is not None:
            transition.change(change=replace(change, short_since_s=None))
        return
    had = f"has {present}"
    may_come = config.on_failure == "slot" or transition.job.may_get_slots()
    if may_come or capacity.worker_capacity(transition.job) >= config.min_np:
        if change.short_since_s is None:
            transition.change(change=replace(change, short_since_s=transition.now_s))
            transition.log(TooFewWorkers(change.number, present, config.min_np, config.elastic_timeout_s))
            return
        if transition.now_s < change.short_since_s + config.elastic_timeout_s:
            return
        short_s = transition.now_s - change.short_since_s
        had = f"had {present} for {short_s:.0f} s (--elastic-timeout {config.elastic_timeout_s:g})"
    if capacity.free_workers(transition):
        _try_start(transition, change)
        return
    needed, why = counted(config.min_np, "worker"), why_not_refilled(transition.job)
    transition.end(1, f"Training needs {needed} (--min-np) and {had}: {why}.")


def _is_end_of_all(job: Job) -> bool:
    return any(loss.raised for loss in job.losses_now()) and not any(job.each_survivor())


def _why_hopeless(job: Job) -> str | None:
    """Return the reason why no further generation can ever start, or None. A job never silently starts again at
    step 0."""
    losses = job.losses_now()
    raised = [loss for loss in losses if loss.raised]
    how = "; ".join(loss.sentence for loss in losses)
    if _is_end_of_all(job):
        if len({loss.raised for loss in losses}) == 1:
            return (
                f"All remaining workers raised the same exception: {raised[0].raised}. Restarting them would not help."
            )
        return f"No worker is left: {how}."
    if is_state_lost(job):
        advice = "none was written yet" if job.saves else "--checkpoint DIR writes them"
        return (
            f"The state of the job is lost: no worker that held it is left ({how}), and there is no checkpoint to "
            f"continue from: {advice}."
        )
    if not (any(job.each_survivor()) or job.newcomers() or job.is_refill_due() or job.may_get_slots()):
        return f"No worker is left ({how}), and none can be started: {why_not_refilled(job)}."
    return None


# The return to the newest checkpoint ----------------------------------------------------------------------------------
#
# After all holders of the state are lost, newcomers read the newest checkpoint, as at the start of a job. A new run
# id begins, so that no checkpoint of the old one is mistaken for it. The next generation is a bootstrap: rank 0 reads
# the checkpoint, and the others copy its state.


def is_state_lost(job: Job) -> bool:
    """Return whether no survivor has the state that some worker has confirmed. One that is not READY may have confirmed
    it in a message that is under way: Synced comes before READY."""
    change = job.change
    return job.was_synced and not any(
        worker.synced or change is None or worker.ready != change.number for worker in job.each_survivor()
    )


def resume_from_checkpoint(transition: Transition) -> None:
    """Reset the job's progress to "no state". Only for a job with a checkpoint."""
    job = transition.job
    transition.change(run_id=job.run_id + 1, was_synced=False, is_finishing=False, lost_at=job.steps_seen, steps_seen=0)
    transition.log(StateLost(job.run_id + 1, "; ".join(loss.sentence for loss in job.losses_now())))


# Recovery -------------------------------------------------------------------------------------------------------------
#
# Recovery from the loss of a worker, up to the first step of the survivors: then a replacement may start.
#
# The way of that step, from the workers to the start of the replacement:
#
#     defer_restarts          a worker is lost: its slot stays empty for now
#     report_first_step       on each survivor, when its first step after the regroup is decided: it sends FirstStep
#                             (worker/worker_recovery.py)
#     record_first_step       the message arrives (called by worker_messages.py)
#     conclude_recovery       all survivors have sent theirs: the deferral ends, and the recovery is reported
#     capacity.fill           in the same decision: the slot is not deferred any more, and gets its worker


def record_loss(transition: Transition, loss: Loss) -> None:
    """Record the loss of a member, or the end of one that was recorded while it was dying."""
    known = {each.worker: each for each in transition.job.losses}
    if (former := known.get(loss.worker)) is not None:
        loss = replace(loss, noticed=former.noticed, silent_since_s=former.silent_since_s, number=former.number)
    transition.change(losses=tuple({**known, loss.worker: loss}.values()))


def _begin_recovery(transition: Transition, change: Change) -> None:
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
    if recovery is None or message.number != recovery.number or not transition.job.is_member(worker.name):
        return
    transition.change_worker(worker.name, stepped=message.number)
    is_slowest = recovery.step is None or _since_start_s(message) > _since_start_s(recovery.step)
    recovery = replace(
        recovery,
        steps_redone=max(recovery.steps_redone, message.steps_redone),
        samples_redone=max(recovery.samples_redone, message.samples_redone),
    )
    transition.change(recovery=replace(recovery, slowest=worker.name, step=message) if is_slowest else recovery)


def conclude_recovery(transition: Transition) -> None:
    """Conclude the recovery once all members have applied a step, or have finished without another one: report it, and
    permit replacements."""
    job, recovery = transition.job, transition.job.recovery
    if recovery is None or job.is_regrouping:
        return  # Or the next fault has already happened.
    if any(not loss.how for loss in job.losses if loss.worker in job.workers):
        return  # Its exit code will tell how it ended.
    if not all(worker.stepped == recovery.number or job.has_finished(worker) for worker in job.each_survivor()):
        return
    transition.change(recovery=None, losses=tuple(job.losses_now()), lost_at=None, restart_deferred_until_s=None)
    if recovery.step is not None:
        transition.log(_report(recovery, recovery.step, job.losses, job.lost_at))


def _since_start_s(step: FirstStep) -> float:
    return step.connected_s + step.synced_s + step.stepped_s


def _report(recovery: Recovery, step: FirstStep, losses: tuple[Loss, ...], lost_at: int | None) -> Recovered:
    regrouped_s = recovery.started_s - recovery.began_s
    # Broken connections may have begun the recovery while the silence of a host was not long enough to be noticed.
    signs_s = [loss.silent_since_s for loss in losses if loss.silent_since_s is not None]
    silent_s = max(0.0, recovery.began_s - min(signs_s, default=recovery.began_s))
    return Recovered(
        number=recovery.number,
        is_planned=recovery.is_planned,
        reason=recovery.reason,
        lost=tuple(f"{loss.worker}, which {loss.how}" for loss in losses),
        noticed=tuple(dict.fromkeys(loss.noticed for loss in losses)),
        last_lines=tuple(line for loss in losses for line in loss.last_lines),
        total_ms=_ms(silent_s + regrouped_s + _since_start_s(step)),
        silent_ms=_ms(silent_s),
        ready_ms=_ms(regrouped_s),
        connected_ms=_ms(step.connected_s),
        synced_ms=_ms(step.synced_s),
        first_step_ms=_ms(step.stepped_s),
        slowest=recovery.slowest,
        steps_redone=recovery.steps_redone,
        samples_redone=recovery.samples_redone,
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


def end_deferral_in_time(transition: Transition) -> None:
    """End the deferral when its time is over. Called whenever time may have passed."""
    until_s = transition.job.restart_deferred_until_s
    if until_s is not None and transition.now_s >= until_s:
        transition.change(restart_deferred_until_s=None)
