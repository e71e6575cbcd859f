"""The end of a job: completed by all workers, or stopped; and the wait for the last exit. Pure."""

from __future__ import annotations

from dataclasses import replace

from farandole.base.events.job_events import ExitsAwaited, JobBecameStatic, TrainingCutShort, TrainingFinished
from farandole.base.wire.link_messages import Finished, Released
from farandole.base.wire.messages import JobOver
from farandole.job.coordinator import capacity
from farandole.job.coordinator.job import Generation, Job, LinkTrouble, Worker
from farandole.job.coordinator.sentences import counted
from farandole.job.coordinator.transition import Outcome, StopRequested, Transition

# Completion: members that send Finished are released when all have, and their exits are awaited -----------------------


def worker_finished(transition: Transition, worker: Worker, message: Finished) -> None:
    """Count a Finished message, unless an abort or this worker's own READY overtook it: the worker will then finish
    again. A worker that is being killed does not finish; the request for its stacks may have woken it."""
    job, number = transition.job, message.number
    if job.is_regrouping or job.is_released or not job.is_member(worker.name) or worker.killed_for:
        return
    if job.generation is not None and number == job.generation.number and worker.ready <= number:
        transition.change_worker(
            worker.name, finished=number, shortfall=message.shortfall, static_because=message.static_because
        )
        transition.change(is_finishing=True)


def release_if_all_finished(transition: Transition) -> None:
    """Release the members of a job that is finishing once all have finished in the same generation, and stop the
    workers that were never admitted."""
    job, generation = transition.job, transition.job.generation
    if generation is None or not all(job.has_finished(worker) for worker in job.each_survivor()):
        return
    members = job.survivors()
    if len(members) < len(generation.members):
        return
    reason = next((worker.static_because for worker in members if worker.static_because), "")
    if reason:
        _become_static(transition, generation, reason)
        return
    transition.send_to_workers(generation.members, Released(generation.number))
    transition.log(TrainingFinished(generation.number, generation.members))
    shortfalls = [worker.shortfall for worker in members if worker.shortfall is not None]
    if shortfalls:  # equal on all members, unless the members run different code
        transition.log(TrainingCutShort.of(max(shortfalls, key=lambda each: (each.steps_left, each.epochs_left))))
    transition.change(is_released=True, released_s=transition.now_s, change=None, links=LinkTrouble())
    for worker in job.newcomers():
        capacity.let_go(transition, worker, "the training finished without it")


def _become_static(transition: Transition, generation: Generation, reason: str) -> None:
    """Let the members train on as a static job: without the elastic function that they have left, they cannot regroup.
    Workers that were never admitted are stopped, and no further ones are started."""
    transition.send_to_workers(generation.members, Released(generation.number))
    transition.log(JobBecameStatic(generation.number, generation.members, reason))
    transition.change(
        static_because=reason,
        is_elastic=False,
        is_finishing=False,
        was_synced=False,
        change=None,
        links=LinkTrouble(),
    )
    for name in generation.members:
        transition.change_worker(name, finished=0)
    for worker in transition.job.newcomers():
        capacity.let_go(transition, worker, "the job is static from now on")


def advance_completion(transition: Transition) -> None:
    """End the job once the process of every member is gone, and that of every released worker within its grace
    period."""
    job = transition.job
    going = any(worker.has_left and worker.kill_at_s is not None for worker in job.workers.values())
    if any(job.each_survivor()) or going:
        _name_awaited(transition)
        return
    if losses := job.losses_now():
        failures = "; ".join(loss.sentence for loss in losses)
        transition.end(1, f"All workers finished the training, but afterwards {failures}.")
    else:
        count = len(job.generation.members) if job.generation else 0
        transition.end(0, f"{counted(count, 'worker')} finished the training.")


NAMED_AFTER_S = 10.0
"""Seconds after the end of the training in which most scripts have ended."""


def exits_deadline(job: Job) -> float | None:
    """Return when the workers are named for whose exit a finished job waits."""
    return None if job.released_s is None else job.released_s + NAMED_AFTER_S


def _name_awaited(transition: Transition) -> None:
    """Name, once, the members that still run. They may have much to do; or they will never end."""
    job, due_s = transition.job, exits_deadline(transition.job)
    running = tuple(worker.name for worker in job.each_survivor())
    if due_s is None or transition.now_s < due_s:
        return
    transition.change(released_s=None)
    if running:
        transition.log(ExitsAwaited(running, NAMED_AFTER_S))


# The end: a request to stop, and the time from the decision to end to the last exit -----------------------------------

# 128 + SIGINT, as in shells.
STOPPED_EXIT_CODE = 130


def stop_requested(transition: Transition, input: StopRequested) -> None:
    """End the job on the user's request: with grace, or at once, also one that ends already."""
    if transition.job.ending is None:
        transition.end(STOPPED_EXIT_CODE, input.reason, grace_s=0.0 if input.now else None)
    elif input.now:
        for name in transition.job.workers:
            transition.kill(name, 0.0, "the job ends at once")
    if input.now and transition.job.ending is not None:
        transition.change(ending=replace(transition.job.ending, deadline_s=transition.now_s))


def advance(transition: Transition) -> None:
    """End the job once none of its processes runs any more, or at the deadline."""
    ending = transition.job.ending
    if ending is None or (transition.job.workers and transition.now_s < ending.deadline_s):
        return
    for agent in transition.job.agents.values():
        if agent.is_connected:
            transition.send(agent.name, JobOver(ending.exit_code, ending.reason))
    transition.actions.append(Outcome(ending.exit_code, ending.reason))
    transition.change(ending=replace(ending, is_done=True))
