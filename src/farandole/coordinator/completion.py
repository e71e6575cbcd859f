"""The completion of a job, from the first Finished on: when all members have sent it they are released, and their exits
are awaited."""

from __future__ import annotations

from farandole.coordinator import formatting, slots
from farandole.coordinator.job import LinkTrouble, Worker
from farandole.coordinator.transition import Transition
from farandole.events import TrainingCutShort, TrainingFinished
from farandole.messages import Finished, Released


def finished(transition: Transition, worker: Worker, message: Finished) -> None:
    """Count a Finished message, unless an abort or this worker's own READY overtook it: the worker will then finish
    again. A worker that is being killed does not finish; the request for its stacks may have woken it."""
    job, number = transition.job, message.number
    is_running = job.change is None or job.change.is_planned
    if not is_running or job.is_released or not job.is_member(worker.name) or worker.killed_for:
        return
    if job.generation is not None and number == job.generation.number and worker.ready <= number:
        transition.change_worker(worker.name, finished=number, shortfall=message.shortfall)
        transition.change(is_finishing=True)


def release_if_all_finished(transition: Transition) -> None:
    """Release the members once all have finished in the same generation, and stop the workers that were never
    admitted."""
    job, generation = transition.job, transition.job.generation
    members = job.survivors()
    if generation is None or len(members) < len(generation.members):
        return
    if not all(job.has_finished(worker) for worker in members):
        return
    transition.tell(generation.members, Released(generation.number))
    transition.log(TrainingFinished(generation.number, generation.members))
    shortfalls = [worker.shortfall for worker in members if worker.shortfall is not None]
    if shortfalls:  # equal on all members, unless the members run different code
        transition.log(TrainingCutShort.of(max(shortfalls, key=lambda each: (each.steps_left, each.epochs_left))))
    transition.change(is_released=True, change=None, losses=(), links=LinkTrouble())
    for worker in job.newcomers():
        slots.let_go(transition, worker, "the training finished without it")


def advance(transition: Transition) -> None:
    """End the job once the process of every member is gone, and that of every released worker within its grace
    period."""
    job = transition.job
    going = any(worker.has_left and worker.kill_at_s is not None for worker in job.workers.values())
    if job.survivors() or going:
        return
    if job.losses:
        failures = "; ".join(loss.sentence for loss in job.losses)
        transition.end(1, f"The training was finished by all workers, but afterwards {failures}.")
    else:
        count = len(job.generation.members) if job.generation else 0
        transition.end(0, f"{formatting.counted(count, 'worker')} finished the training.")
