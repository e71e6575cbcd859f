"""The coordinator's one decision: `decide(job, input, now_s)` gives the next job and what to do. Pure.

Each theme has a file. What happens when a worker dies is lost.py, then regroup.py.

    slots.py     which slots get a worker          lost.py     a worker, or a whole agent, is gone
    hosts.py     hosts come and go                 quarantine.py  hosts where workers are lost are out
    founding.py  until generation 1                regroup.py  from one generation to the next
    talk.py      what workers say                  links.py    reports of failed connections
    spares.py    workers that wait for a loss      resting.py  slots that fail again and again sit out
    recovery.py  what a regroup has cost           watchdog.py when nobody gets on any more
    finish.py    from the first Finished on        ending.py   from the decision to end to the last exit
    probes.py    which links are proved to be broken
    survivors_first.py  a replacement is started when the survivors train again

An input first changes what is known (`_note`); then `_settle` draws the conclusions from what is known now.
So no rule depends on which input came last, and old, repeated or contradictory ones change nothing.
"""

from __future__ import annotations

from farandole.coordinator import (
    ending,
    finish,
    founding,
    hosts,
    links,
    lost,
    quarantine,
    recovery,
    regroup,
    resting,
    slots,
    spares,
    survivors_first,
    talk,
    watchdog,
)
from farandole.coordinator.actions import Action
from farandole.coordinator.draft import Draft
from farandole.coordinator.inputs import (
    AgentConnected,
    AgentLost,
    AgentTold,
    DrainRequested,
    HostsOffered,
    Input,
    ScaleRequested,
    StepsSeen,
    StepsStalled,
    StopRequested,
    Tick,
    UndrainRequested,
)
from farandole.coordinator.job import Job
from farandole.events import WorkerStacks
from farandole.messages import AgentLeaving, AgentMessage, FromWorker, SpawnFailed, WorkerDying, WorkerExited


def decide(job: Job, input: Input, now_s: float) -> tuple[Job, list[Action]]:
    """The job after `input`, and what has to be done, in order. `now_s`: a monotonic clock, in seconds."""
    if job.ending is not None and job.ending.is_done:
        return job, []
    draft = Draft(job, now_s)
    if job.ending is not None:
        ending.note(draft, input)
    else:
        _note(draft, input)
    _settle(draft)
    return draft.job, draft.actions


def next_deadline(job: Job) -> float | None:
    """When `decide` wants a Tick if nothing happens before, by the clock of `now_s`; None: never."""
    if job.ending is not None:
        return None if job.ending.is_done else job.ending.deadline_s
    of_regroup = (
        links.deadline(job),
        regroup.shortage_deadline(job),
        regroup.newcomers_deadline(job),
        regroup.lease_deadline(job),
    )
    deadlines = [
        job.start_deadline_s,
        *(() if regroup.awaits_exits(job) else of_regroup),
        quarantine.deadline(job),
        resting.deadline(job),
        job.survivors_first_until_s,
        *(worker.kill_at_s for worker in job.workers.values()),
    ]
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _note(draft: Draft, input: Input) -> None:
    match input:
        case HostsOffered():
            hosts.hosts_offered(draft, input)
        case AgentConnected():
            hosts.agent_connected(draft, input)
        case AgentLost():
            lost.agent_lost(draft, input)
        case AgentTold(agent, message):
            _agent_told(draft, agent, message)
        case StopRequested():
            ending.stop_requested(draft, input)
        case ScaleRequested(size):
            slots.scale_requested(draft, size)
        case DrainRequested(host, reason):
            hosts.drain(draft, host, reason)
        case UndrainRequested(host):
            hosts.undrain(draft, host)
        case StepsStalled():
            watchdog.steps_stalled(draft, input)
        case StepsSeen(step):
            draft.change(steps_seen=max(step, draft.job.steps_seen))
        case Tick():
            pass  # Only the time has changed.


def _agent_told(draft: Draft, agent: str, message: AgentMessage) -> None:
    match message:
        case FromWorker(name, said):
            worker = draft.job.workers.get(name)
            if worker is not None and worker.slot.agent == agent:
                talk.worker_said(draft, worker, said)
        case WorkerDying(name):
            worker = draft.job.workers.get(name)
            if worker is not None and worker.slot.agent == agent:
                lost.worker_dying(draft, worker)
        case WorkerExited() | SpawnFailed():
            if isinstance(message, WorkerExited) and message.stacks:
                draft.log(WorkerStacks(message.worker, message.stacks))
            worker = draft.job.workers.get(message.worker)
            if worker is not None and worker.slot.agent == agent:
                lost.worker_gone(draft, worker, message)
        case AgentLeaving(reason):
            hosts.agent_leaves(draft, agent, reason)
        case _:
            pass  # An AgentHello comes as AgentConnected, and beats are the shell's business.


def _settle(draft: Draft) -> None:
    if draft.job.ending is None:
        talk.kill_overdue(draft)
        quarantine.let_back(draft)
        resting.let_back(draft)
        survivors_first.end_in_time(draft)
        hosts.dismiss_idle(draft)
        recovery.tell_when_over(draft)
        slots.follow_hosts(draft)
        slots.fill(draft)
        spares.warn_of_missing(draft)
        if draft.job.generation is None:
            founding.advance(draft)
        elif draft.job.is_released:
            finish.advance(draft)
        elif draft.job.is_elastic:
            _settle_elastic(draft)
    if draft.job.ending is None:
        slots.warn_of_missing(draft)
    else:
        ending.advance(draft)


def _settle_elastic(draft: Draft) -> None:
    if regroup.awaits_exits(draft.job):
        return
    for rule in (regroup.end_if_hopeless, links.judge, finish.release_if_all_finished, regroup.advance):
        rule(draft)
        if draft.job.ending is not None or draft.job.is_released:
            return
