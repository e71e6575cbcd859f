"""The restart of all workers, as under torchrun: for scripts without an elastic function. Pure.

A script that never enters an elastic function cannot continue without one of its workers. With --max-restarts, when a
worker fails (`begin`), all others are stopped, and when all are gone (`advance`) every slot gets a new worker. The
job is then as at its bootstrap, except for the numbers of its attempt and of its generations. Names of workers are
never used again, so messages of an earlier attempt change nothing. In a job that fills its slots, further slots have
the same effect (`_use_more_slots`), which counts as no failure.
"""

from __future__ import annotations

from farandole.base.events.worker_events import AllWorkersRestart, WorkerFailed
from farandole.base.wire.messages import WorkerExited
from farandole.job.coordinator import capacity
from farandole.job.coordinator.job import Job, LinkTrouble, WholeRestart, Worker
from farandole.job.coordinator.transition import Transition


def is_possible(job: Job) -> bool:
    """Return whether a failure now restarts all workers."""
    most = job.config.max_restarts
    return most is not None and job.failed_attempts < most and not job.is_elastic and job.whole_restart is None


def begin(transition: Transition, reason: str) -> None:
    """Stop all workers, to start them again. `reason`: the failure, as a clause."""
    job = transition.job
    most = job.config.max_restarts or 0
    transition.log(AllWorkersRestart(job.target, job.failed_attempts + 2, most + 1, reason))
    transition.change(failed_attempts=job.failed_attempts + 1)
    _stop_all(transition, reason)


def _use_more_slots(transition: Transition) -> None:
    """Restart all workers, without a failure, where the job fills its slots and has more of them than at the start of
    this attempt. Once a worker has ended the training is about to end, too, and goes on as it is."""
    job = transition.job
    is_plain = job.config.max_restarts is not None and not (job.is_elastic or job.is_released)
    if not (is_plain and job.config.fills_slots and job.workers) or job.whole_restart is not None:
        return
    used, wanted = capacity.open_slots(job), min(job.target, capacity.usable_slots(job))
    if len(job.workers) == used < wanted:
        reason = f"there are slots for {wanted} instead of {used}"
        transition.log(AllWorkersRestart(wanted, job.failed_attempts + 1, None, reason))
        _stop_all(transition, reason)


def _stop_all(transition: Transition, reason: str) -> None:
    job = transition.job
    for name in job.workers:
        transition.kill(name, job.config.grace_s, "all workers are restarted")
    transition.change(whole_restart=WholeRestart(reason), start_deadline_s=None)


def advance(transition: Transition) -> None:
    """Stop all workers where further slots are to be used. Return to the state of the bootstrap once no process of the
    earlier attempt can run any more."""
    _use_more_slots(transition)
    job = transition.job
    if job.whole_restart is None or job.workers:
        return
    if job.lease_end_s is not None and transition.now_s < job.lease_end_s:
        return  # Workers of a lost host may still run, and write to the files of the script.
    transition.change(
        whole_restart=None,
        attempt=job.attempt + 1,
        generation=None,
        change=None,
        slots={slot: use for slot, use in job.slots.items() if use.is_given_up},
        missing_slots=0,
        plain_exits=(),
        never_met=(),
        alone=(),
        has_met=False,
        losses=(),
        static_because="",
        steps_seen=0,
        recovery=None,
        restart_deferred_until_s=None,
        lease_end_s=None,
        links=LinkTrouble(),
        stall=None,
        start_deadline_s=None,
    )


def attempts_so_far(job: Job) -> str:
    """Return a clause for the failure that ends the job: how many attempts there were, or that none is left."""
    if job.config.max_restarts is None:
        return ""
    if not job.config.max_restarts:
        return "--max-restarts 0: no worker is started again"
    return f"this was attempt {job.failed_attempts + 1} of {job.config.max_restarts + 1} (--max-restarts)"


def report_failure(transition: Transition, worker: Worker, message: WorkerExited | None) -> None:
    """Log the failure of a worker of a static job in detail, for the report of its root cause. `message`: None for a
    worker whose agent was lost. A worker that ended because it was stopped has failed only if it recorded an error."""
    job, place = transition.job, worker.place
    error = None if message is None else message.error
    if place is None or worker.has_left or (message is not None and message.exit_code == 0):
        return
    if error is None and (worker.killed_for or job.config.max_restarts is None):
        return
    transition.log(
        WorkerFailed(
            worker=worker.name,
            host=job.host_of(worker),
            rank=place.rank,
            local_rank=place.local_rank,
            attempt=job.attempt,
            pid=worker.pid if message is None else message.pid,
            exit_code=None if message is None else message.exit_code,
            message=(worker.raised or "") if error is None else error.message,
            traceback="" if error is None else error.traceback,
            error_file="" if error is None else error.file,
            time_s=0 if error is None else error.time_s,
            was_stopped=bool(worker.killed_for),
        )
    )
