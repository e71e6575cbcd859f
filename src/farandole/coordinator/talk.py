"""What workers say, and what the coordinator knows from it. transitions.py draws the conclusions."""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator import finish, links, probes, publishing, recovery, regroup, slots, spares
from farandole.coordinator.draft import Draft
from farandole.coordinator.job import Worker
from farandole.events import StatesDiverged, TransportChosen, UserCodeFailed, WorkerLeaves
from farandole.membership import Address
from farandole.messages import (
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


def worker_said(draft: Draft, worker: Worker, said: WorkerMessage) -> None:
    """Take note of a living worker's message. Before its Hello and after it has left, nothing counts."""
    if worker.has_left or worker.is_dying:
        return
    if isinstance(said, Hello):
        _hello(draft, worker, said.address, said.pid)
    elif worker.address is not None:
        match said:
            case Elastic():
                _elastic(draft, worker)
            case Ready(number):
                _ready(draft, worker, number)
            case Synced(number):
                _synced(draft, worker, number)
            case LinkBroken():
                links.link_broken(draft, worker, said)
            case Probed():
                probes.probed(draft, worker, said)
            case Connected(number, way):
                draft.log(TransportChosen(number, way))
            case FirstStep():
                recovery.first_step(draft, worker, said)
            case StatesDiffered():
                _differed(draft, said)
            case Failed():
                _failed(draft, worker, said)
            case Finished():
                finish.finished(draft, worker, said)
            case Leaving():
                _leaving(draft, worker)
            case MayPublish():
                publishing.may_publish(draft, worker, said)
            case CheckpointEnded():
                publishing.ended(draft, worker, said)


def kill_overdue(draft: Draft) -> None:
    """A worker whose code raised ends by itself; if it does not, the others must not wait for it for ever."""
    for name, worker in draft.job.workers.items():
        if worker.kill_at_s is not None and draft.now_s >= worker.kill_at_s:
            what = f"it raised {worker.raised}" if worker.raised else "it was let go"
            draft.kill(name, 0.0, f"it did not end after {what}")


def _hello(draft: Draft, worker: Worker, address: Address, pid: int) -> None:
    if worker.address is not None:
        return
    draft.change_worker(worker.name, address=address, pid=pid)
    if draft.job.generation is not None:
        draft.tell([worker.name], Newcomer(len(draft.job.generation.members)))


def _elastic(draft: Draft, worker: Worker) -> None:
    if draft.job.generation is None or worker.is_elastic:
        return
    draft.change_worker(worker.name, is_elastic=True, elastic_s=draft.now_s)
    draft.change(is_elastic=True)
    spares.tell_of(draft, worker)
    gone = set(draft.job.generation.members).difference(draft.job.workers)
    if gone and draft.job.change is None:
        # They ended with code 0 while the script still looked static. The others do need them.
        regroup.abort(draft, f"{', '.join(sorted(gone))} exited before the elastic function")


def _ready(draft: Draft, worker: Worker, number: int) -> None:
    change = draft.job.change
    if change is not None and number == change.number and draft.job.is_member(worker.name):
        draft.change_worker(worker.name, ready=number)


def _synced(draft: Draft, worker: Worker, number: int) -> None:
    generation = draft.job.generation
    if generation is None or number != generation.number or worker.name not in generation.members:
        return
    draft.change_worker(worker.name, synced=number)
    draft.change(was_synced=True)
    if all(member.synced == number for member in draft.job.survivors()):
        draft.change(links=replace(draft.job.links, retries=0))


def _differed(draft: Draft, said: StatesDiffered) -> None:
    generation = draft.job.generation
    if generation is not None and generation.number == said.number:
        workers = tuple(generation.members[rank] for rank in said.ranks)
        source = generation.members[said.source]
        draft.log(StatesDiverged(said.step, said.name, said.objects, workers, source, said.is_fatal))


def _failed(draft: Draft, worker: Worker, said: Failed) -> None:
    if worker.raised is None:
        kill_at_s = draft.now_s + draft.job.config.grace_s
        draft.change_worker(worker.name, raised=said.summary, kill_at_s=kill_at_s)
        draft.log(UserCodeFailed(worker.name, said.summary, said.traceback))


def _leaving(draft: Draft, worker: Worker) -> None:
    """The job shrinks by this worker. A member goes at a boundary (regroup.py), anybody else at once."""
    job = draft.job
    if worker.was_asked or worker.killed_for or job.is_released:
        return
    if worker.is_leaving:
        draft.change_worker(worker.name, was_asked=True)
        return
    draft.log(WorkerLeaves(worker.name, worker.slot.index))
    slots.close(draft, worker.slot)
    draft.change_slot(worker.slot, is_given_up=job.config.fills_slots)  # or it would be filled again at once
    if job.is_member(worker.name) or not job.spares:
        draft.change(target=max(0, job.target - 1))
    else:
        draft.change(spares=job.spares - 1)
    draft.change_worker(worker.name, is_leaving=True, was_asked=True)
    if not job.is_member(worker.name):
        draft.tell([worker.name], Left())
        draft.change_worker(worker.name, has_left=True)
