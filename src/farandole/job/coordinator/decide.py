"""The coordinator's one decision: `decide(job, inputs, now_s)` returns the next job and the actions. Pure.

Each theme has a file. The death of a worker is handled by worker_failure.py, then regroup.py.

    worker_messages.py        messages of workers; which checkpoints may be published
    worker_failure.py         a worker, or an agent with all its workers, is lost
    regroup.py                the bootstrap; the change from one generation to the next, its durations and costs; no
                              replacement starts before its first step
    hosts.py                  hosts are added, drained, removed, and quarantined after failures; backoff of slots
                              after repeated failures
    capacity.py               which slots get a worker; spares
    whole_restart.py          all workers are stopped and started again, where none had entered an elastic function
    hang_detection.py         no worker makes progress
    broken_links.py           connections fail: probes prove which links are broken
    shutdown.py               from the first Finished, or from a request to stop, to the last exit

The inputs first change the known facts (`_apply_input`); then `_settle` draws the conclusions from them. So no rule
depends on which input came last, and old, repeated or contradictory ones change nothing. Inputs that arrived together
are settled together: an input costs the same in a job of any size, and only the conclusions, once for all of them, cost
more in a larger job (docs/scale.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.base.events.worker_events import WorkerStacks
from farandole.base.wire.control import AskDrain, AskScale, AskUndrain
from farandole.base.wire.messages import (
    AgentLeaving,
    AgentMessage,
    FromWorker,
    SpawnFailed,
    WorkerDying,
    WorkerExited,
    WorkerMet,
)
from farandole.job.coordinator import (
    bootstrap,
    broken_links,
    capacity,
    hang_detection,
    hosts,
    regroup,
    shutdown,
    whole_restart,
    worker_failure,
    worker_messages,
)
from farandole.job.coordinator.job import Job, Worker
from farandole.job.coordinator.transition import (
    Action,
    AgentConnected,
    AgentLost,
    AgentReported,
    HostsOffered,
    Input,
    StepsSeen,
    StepsStalled,
    StopRequested,
    Tick,
    Transition,
)


def decide(job: Job, inputs: Sequence[Input], now_s: float) -> tuple[Job, list[Action]]:
    """Return the job after the inputs, and the actions to take, in order.

    inputs  in the order in which they arrived. Conclude what came before the loss of an agent in a decision of its own:
            its last worker may have ended the job with success
    now_s   a monotonic clock, in seconds
    """
    if job.ending is not None and job.ending.is_done:
        return job, []
    transition = Transition(job, now_s)
    for input in inputs:
        if transition.job.ending is None or isinstance(input, AgentLost | AgentReported | StopRequested):
            _apply_input(transition, input)
    _settle(transition)
    return transition.job, transition.actions


def next_deadline(job: Job) -> float | None:
    """Return when `decide` needs a Tick if no other input comes before, by the clock of `now_s`; None: never."""
    if job.ending is not None:
        return None if job.ending.is_done else job.ending.deadline_s
    of_regroup = (
        broken_links.next_judgement(job),
        regroup.shortage_deadline(job),
        regroup.newcomers_deadline(job),
        regroup.lease_deadline(job),
    )
    deadlines = [
        job.start_deadline_s,
        *(() if regroup.awaits_exits(job) else of_regroup),
        hosts.quarantine_deadline(job),
        hosts.backoff_deadline(job),
        None if job.whole_restart is None or job.workers else job.lease_end_s,
        None if job.workers else capacity.last_call_deadline(job),
        job.restart_deferred_until_s,
        shutdown.exits_deadline(job),
        *(worker.kill_at_s for worker in job.workers.values()),
    ]
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _apply_input(transition: Transition, input: Input) -> None:
    match input:
        case HostsOffered():
            hosts.hosts_offered(transition, input)
        case AgentConnected():
            hosts.agent_connected(transition, input)
        case AgentLost():
            worker_failure.agent_lost(transition, input)
        case AgentReported(agent, message):
            _agent_reported(transition, agent, message)
        case StopRequested():
            shutdown.stop_requested(transition, input)
        case AskScale(size):
            capacity.scale_requested(transition, size)
        case AskDrain(host):
            hosts.drain_host(transition, host, "requested by a user")
        case AskUndrain(host):
            hosts.undrain_host(transition, host)
        case StepsStalled():
            hang_detection.steps_stalled(transition, input)
        case StepsSeen(step):
            transition.change(steps_seen=max(step, transition.job.steps_seen))
        case Tick():
            pass  # Only time has passed.


def _agent_reported(transition: Transition, agent: str, message: AgentMessage) -> None:
    if isinstance(message, WorkerExited) and message.stacks:
        transition.log(WorkerStacks(message.worker, message.stacks))
    if isinstance(message, FromWorker | SpawnFailed | WorkerDying | WorkerExited | WorkerMet):
        worker = transition.job.workers.get(message.worker)
        if worker is not None and worker.slot.agent == agent:
            _worker_reported(transition, worker, message)
    elif isinstance(message, AgentLeaving) and transition.job.ending is None:
        hosts.agent_leaves(transition, agent, message.reason)
    # An AgentHello comes as AgentConnected, and the shell handles heartbeats.


def _worker_reported(
    transition: Transition,
    worker: Worker,
    message: FromWorker | SpawnFailed | WorkerDying | WorkerExited | WorkerMet,
) -> None:
    match message:
        case FromWorker():
            worker_messages.handle(transition, worker, message.message)
        case WorkerExited() | SpawnFailed():
            worker_failure.worker_gone(transition, worker, message)
        case WorkerDying() if transition.job.ending is None:
            worker_failure.worker_dying(transition, worker)
        case WorkerMet() if transition.job.ending is None:
            worker_messages.worker_met(transition, worker, message.has_met)


def _settle(transition: Transition) -> None:
    if transition.job.ending is None:
        regroup.abort_for_faults(transition)
        worker_messages.kill_overdue(transition)
        hosts.end_quarantines(transition)
        hosts.end_backoffs(transition)
        regroup.end_deferral_in_time(transition)
        hosts.dismiss_idle(transition)
        regroup.conclude_recovery(transition)  # before capacity.fill, which starts the replacement
        capacity.follow_hosts(transition)
        if not transition.job.is_elastic or transition.job.whole_restart is not None:
            whole_restart.advance(transition)
        capacity.count_slots_for_all(transition)
        capacity.fill(transition)
        capacity.warn_of_missing_spares(transition)
        if transition.job.whole_restart is not None:
            pass  # Only exits are awaited.
        elif transition.job.generation is None:
            bootstrap.advance_bootstrap(transition)
        elif transition.job.is_released:
            shutdown.advance_completion(transition)
        elif transition.job.is_elastic:
            _settle_elastic(transition)
    if transition.job.ending is None:
        capacity.warn_of_missing(transition)
    else:
        shutdown.advance(transition)


def _settle_elastic(transition: Transition) -> None:
    if regroup.awaits_exits(transition.job):
        return
    regroup.end_if_hopeless(transition)
    if transition.job.ending is None:
        broken_links.judge_links(transition)
    if transition.job.ending is None and transition.job.is_finishing:
        shutdown.release_if_all_finished(transition)
    if transition.job.ending is None and not transition.job.is_released:
        regroup.advance(transition)
