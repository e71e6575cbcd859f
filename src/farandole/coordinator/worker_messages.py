"""The messages of workers, and the changes to the job that they cause. decide.py draws the conclusions."""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator import checkpoint_publishing, link_failures, recovery, regroup, shutdown, slots
from farandole.coordinator.job import Worker
from farandole.coordinator.transition import Transition
from farandole.events import StatesDiverged, TransportChosen, UserCodeFailed, WorkerLeaves
from farandole.membership import Address
from farandole.wire.messages import (
    CheckpointEnded,
    Connected,
    Elastic,
    Failed,
    Finished,
    FirstStep,
    Hello,
    Leaving,
    Left,
    LinkBroken,
    MayPublish,
    Newcomer,
    Probed,
    Ready,
    StatesDiffered,
    Synced,
    WorkerMessage,
)


def handle(transition: Transition, worker: Worker, message: WorkerMessage) -> None:
    """Apply a living worker's message. Messages before its Hello and after it has left are ignored."""
    if worker.has_left or worker.is_dying:
        return
    if isinstance(message, Hello):
        _hello(transition, worker, message.address, message.pid)
    elif worker.address is not None:
        match message:
            case Elastic():
                _elastic(transition, worker)
            case Ready(number):
                _ready(transition, worker, number)
            case Synced(number):
                _synced(transition, worker, number)
            case LinkBroken():
                link_failures.link_broken(transition, worker, message)
            case Probed():
                link_failures.note_probe_result(transition, worker, message)
            case Connected(number, way):
                transition.log(TransportChosen(number, way))
            case FirstStep():
                recovery.record_first_step(transition, worker, message)
            case StatesDiffered():
                _differed(transition, message)
            case Failed():
                _failed(transition, worker, message)
            case Finished():
                shutdown.worker_finished(transition, worker, message)
            case Leaving():
                _leaving(transition, worker)
            case MayPublish():
                checkpoint_publishing.may_publish(transition, worker, message)
            case CheckpointEnded():
                checkpoint_publishing.checkpoint_ended(transition, worker, message)


def kill_overdue(transition: Transition) -> None:
    """Kill workers whose time to end by themselves is over: the others must not wait for them for ever."""
    for name, worker in transition.job.workers.items():
        if worker.kill_at_s is not None and transition.now_s >= worker.kill_at_s:
            what = f"it raised {worker.raised}" if worker.raised else "it was released"
            transition.kill(name, 0.0, f"it did not end after {what}")


def _hello(transition: Transition, worker: Worker, address: Address, pid: int) -> None:
    if worker.address is not None:
        return
    transition.change_worker(worker.name, address=address, pid=pid)
    if transition.job.generation is not None:
        transition.send_to_workers([worker.name], Newcomer(len(transition.job.generation.members)))


def _elastic(transition: Transition, worker: Worker) -> None:
    if transition.job.generation is None or worker.is_elastic:
        return
    transition.change_worker(worker.name, is_elastic=True, elastic_s=transition.now_s)
    transition.change(is_elastic=True)
    slots.report_spare(transition, worker)
    gone = set(transition.job.generation.members).difference(transition.job.workers)
    if gone and transition.job.change is None:
        # They ended with code 0 while the script still looked static. The other workers need them.
        regroup.abort(transition, f"{', '.join(sorted(gone))} exited before the elastic function")


def _ready(transition: Transition, worker: Worker, number: int) -> None:
    change = transition.job.change
    if change is not None and number == change.number and transition.job.is_member(worker.name):
        transition.change_worker(worker.name, ready=number)


def _synced(transition: Transition, worker: Worker, number: int) -> None:
    generation = transition.job.generation
    if generation is None or number != generation.number or worker.name not in generation.members:
        return
    transition.change_worker(worker.name, synced=number)
    transition.change(was_synced=True)
    if all(member.synced == number for member in transition.job.survivors()):
        transition.change(links=replace(transition.job.links, retries=0))


def _differed(transition: Transition, message: StatesDiffered) -> None:
    generation = transition.job.generation
    if generation is not None and generation.number == message.number:
        workers = tuple(generation.members[rank] for rank in message.ranks)
        source = generation.members[message.source]
        transition.log(StatesDiverged(message.step, message.name, message.objects, workers, source, message.is_fatal))


def _failed(transition: Transition, worker: Worker, message: Failed) -> None:
    if worker.raised is None:
        kill_at_s = transition.now_s + transition.job.config.grace_s
        transition.change_worker(worker.name, raised=message.summary, kill_at_s=kill_at_s)
        transition.log(UserCodeFailed(worker.name, message.summary, message.traceback))


def _leaving(transition: Transition, worker: Worker) -> None:
    """Shrink the job by this worker. A member leaves at a boundary (regroup.py), any other worker at once."""
    job = transition.job
    if worker.was_asked or worker.killed_for or job.is_released:
        return
    if worker.is_leaving:
        transition.change_worker(worker.name, was_asked=True)
        return
    transition.log(WorkerLeaves(worker.name, worker.slot.index))
    slots.close(transition, worker.slot)
    transition.change_slot(worker.slot, is_given_up=job.config.fills_slots)  # else it would be filled again at once
    if job.is_member(worker.name) or not job.spares:
        transition.change(target=max(0, job.target - 1))
    else:
        transition.change(spares=job.spares - 1)
    transition.change_worker(worker.name, is_leaving=True, was_asked=True)
    if not job.is_member(worker.name):
        transition.send_to_workers([worker.name], Left())
        transition.change_worker(worker.name, has_left=True)
