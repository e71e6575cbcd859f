"""The messages of workers, and the changes to the job that they cause. decide.py draws the conclusions. Pure."""

from __future__ import annotations

from dataclasses import replace

from farandole.base.events.generation_events import TransportChosen
from farandole.base.events.job_events import (
    CheckpointFailed,
    CheckpointSaved,
    JobRemarked,
    WorkerMetOthers,
    WorkerTrainsAlone,
)
from farandole.base.events.worker_events import (
    ShardWrong,
    StateHash,
    StatesDiverged,
    StragglerFound,
    StragglerRecovered,
    UserCodeFailed,
    WorkerLeaves,
)
from farandole.base.membership import DataAddress
from farandole.base.wire import link_messages
from farandole.job.coordinator import broken_links, capacity, hosts, regroup, shutdown
from farandole.job.coordinator.job import Job, Worker
from farandole.job.coordinator.transition import Transition


def handle(transition: Transition, worker: Worker, message: link_messages.WorkerMessage) -> None:
    """Apply a living worker's message. Messages before its Hello and after it has left are ignored, and while the job
    ends all but those about the emergency checkpoint."""
    if transition.job.ending is not None:
        match message:
            case link_messages.MayPublish():
                _may_publish(transition, worker, message)
            case link_messages.CheckpointEnded():
                _checkpoint_ended(transition, worker, message)
        return
    if worker.has_left or worker.is_dying:
        return
    if transition.job.whole_restart is not None:
        if isinstance(message, link_messages.Failed):
            _failed(transition, worker, message)  # for the log: it may be the cause of the failure that came first
        return
    if isinstance(message, link_messages.Hello):
        _hello(transition, worker, message.address, message.pid)
    elif worker.address is not None:
        match message:
            case link_messages.Elastic():
                _elastic(transition, worker)
            case link_messages.Ready(number):
                _ready(transition, worker, number)
            case link_messages.Synced(number):
                _synced(transition, worker, number)
            case link_messages.LinkBroken():
                broken_links.link_broken(transition, worker, message)
            case link_messages.Probed():
                broken_links.note_probe_result(transition, worker, message)
            case link_messages.Connected(number, way):
                transition.log(TransportChosen(number, way))
            case link_messages.FirstStep():
                regroup.record_first_step(transition, worker, message)
            case link_messages.StatesDiffered():
                _differed(transition, message)
            case link_messages.StateHashed():
                transition.log(StateHash(message.step, message.epoch, message.hash))
            case link_messages.ShardDiffered():
                _computed_wrongly(transition, message)
            case link_messages.StragglerSeen():
                _straggles(transition, message)
            case link_messages.Remark(topic, text):
                transition.log(JobRemarked(topic, text))
            case link_messages.WorkersFixed(number, because):
                capacity.fix_workers(transition, number, because)
            case link_messages.Failed():
                _failed(transition, worker, message)
            case link_messages.Finished():
                shutdown.worker_finished(transition, worker, message)
            case link_messages.Leaving():
                _leaving(transition, worker)
            case link_messages.MayPublish():
                _may_publish(transition, worker, message)
            case link_messages.CheckpointEnded():
                _checkpoint_ended(transition, worker, message)


def kill_overdue(transition: Transition) -> None:
    """Kill workers whose time to end by themselves is over: the others must not wait for them for ever."""
    for name, worker in transition.job.workers.items():
        if worker.kill_at_s is not None and transition.now_s >= worker.kill_at_s:
            what = f"it raised {worker.raised}" if worker.raised else "it was released"
            transition.kill(name, 0.0, worker.killed_for or f"it did not end after {what}")


def _hello(transition: Transition, worker: Worker, address: DataAddress, pid: int) -> None:
    if worker.address is not None:
        return
    transition.change_worker(worker.name, address=address, pid=pid)
    worker_met(transition, worker, has_met=True)
    if transition.job.generation is not None:
        news = link_messages.Newcomer(len(transition.job.generation.members), transition.job.steps_seen)
        transition.send_to_workers([worker.name], news)


def worker_met(transition: Transition, worker: Worker, has_met: bool) -> None:
    """Record that a worker has met the others, or else that it trains without having met them. The latter is withdrawn
    by the former: a script may make a step to warm up, and join the others then."""
    job = transition.job
    if has_met:
        transition.change(has_met=True)
        transition.change_worker(worker.name, has_met=True)
        if worker.name in job.alone:
            transition.change(alone=tuple(name for name in job.alone if name != worker.name))
            transition.log(WorkerMetOthers(worker.name))
    elif worker.address is None and worker.name not in job.alone and job.target > 1:
        transition.change(alone=(*job.alone, worker.name))
        transition.log(WorkerTrainsAlone(worker.name, job.target))


def _elastic(transition: Transition, worker: Worker) -> None:
    if transition.job.generation is None or worker.is_elastic:
        return
    looked_static = not transition.job.is_elastic
    transition.change_worker(worker.name, is_elastic=True, elastic_s=transition.now_s)
    transition.change(is_elastic=True)
    capacity.report_spare(transition, worker)
    if looked_static and (gone := set(transition.job.generation.members).difference(transition.job.workers)):
        # They ended with code 0 while the script still looked static. The other workers need them.
        transition.faults.append(f"{', '.join(sorted(gone))} exited before the elastic function")


def _ready(transition: Transition, worker: Worker, number: int) -> None:
    change = transition.job.change
    if change is not None and number == change.number and transition.job.is_member(worker.name):
        transition.change_worker(worker.name, ready=number)


def _synced(transition: Transition, worker: Worker, number: int) -> None:
    generation = transition.job.generation
    if generation is None or number != generation.number or not transition.job.is_member(worker.name):
        return
    transition.change_worker(worker.name, synced=number)
    transition.change(was_synced=True)
    links = transition.job.links
    if links.retries and all(member.synced == number for member in transition.job.each_survivor()):
        transition.change(links=replace(links, retries=0))


def _differed(transition: Transition, message: link_messages.StatesDiffered) -> None:
    generation = transition.job.generation
    if generation is not None and generation.number == message.number:
        workers = tuple(generation.members[rank] for rank in message.ranks)
        source = generation.members[message.source]
        transition.log(StatesDiverged(message.step, message.name, message.objects, workers, source, message.is_fatal))


def _computed_wrongly(transition: Transition, message: link_messages.ShardDiffered) -> None:
    """Use the slots no more of the workers that were wrong, which end by themselves; nor their hosts, if others have
    enough members."""
    generation = transition.job.generation
    if generation is None or generation.number != message.number:
        return
    witnesses = tuple(generation.members[rank] for rank in message.witnesses)
    for rank in message.ranks:
        worker = transition.job.workers.get(generation.members[rank])
        if worker is None or worker.killed_for or transition.job.slots[worker.slot].is_given_up:
            continue  # another rank has said so before
        host = transition.job.host_of(worker)
        transition.log(ShardWrong(message.step, message.shard, worker.name, host, witnesses))
        capacity.close_slot(transition, worker.slot)
        transition.change_slot(worker.slot, is_given_up=True)
        why, kill_at_s = "it had computed a shard wrongly", transition.now_s + transition.job.config.grace_s
        transition.change_worker(worker.name, killed_for=why, kill_at_s=kill_at_s)
        elsewhere = sum(transition.job.host_of(each) != host for each in transition.job.each_survivor())
        if elsewhere >= transition.job.config.min_np:
            hosts.drain_host(transition, host, f"{worker.name} has computed wrongly there")


def _straggles(transition: Transition, message: link_messages.StragglerSeen) -> None:
    generation = transition.job.generation
    if generation is not None and generation.number == message.number and message.rank < len(generation.members):
        worker = generation.members[message.rank]
        host = transition.job.host_of(transition.job.workers[worker])
        if message.is_slow:
            transition.log(StragglerFound(worker, message.rank, host, message.percent, message.step))
        else:
            transition.log(StragglerRecovered(worker, message.rank, host, message.percent, message.step))


def _failed(transition: Transition, worker: Worker, message: link_messages.Failed) -> None:
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
    capacity.close_slot(transition, worker.slot)
    transition.change_slot(worker.slot, is_given_up=job.config.fills_slots)  # else it would be filled again at once
    if job.is_member(worker.name) or not job.spares:
        transition.change(target=max(0, job.target - 1))
    else:
        transition.change(spares=job.spares - 1)
    transition.change_worker(worker.name, is_leaving=True, was_asked=True)
    if not job.is_member(worker.name):
        transition.send_to_workers([worker.name], link_messages.Left())
        transition.change_worker(worker.name, has_left=True)


# Checkpoints: the permission to publish one, and what became of it ---------------------------------------------------


def _may_publish(transition: Transition, worker: Worker, asked: link_messages.MayPublish) -> None:
    """Answer a worker that asks to publish. Every state that a living member has captured, also before the last
    regroup, is in the past of all members: the source rank was never behind it. So the generation of the checkpoint
    does not matter; the worker only has to be a member now."""
    refusal = _why_not(transition.job, worker, asked)
    if not refusal:
        transition.change(published={**transition.job.published, asked.file: asked.progress})
        if not asked.file:
            # From now on there may be a checkpoint, even if its writer does not live to report it.
            transition.change(has_checkpoint=transition.job.saves)
    transition.send_to_workers([worker.name], link_messages.PublishAnswer(asked.name, refusal))


def _checkpoint_ended(transition: Transition, worker: Worker, message: link_messages.CheckpointEnded) -> None:
    if message.error:
        transition.log(CheckpointFailed(worker.name, message.step, message.error))
    else:
        transition.log(CheckpointSaved(worker.name, message.step, message.name, message.took_s))


def _why_not(job: Job, worker: Worker, asked: link_messages.MayPublish) -> str:
    if not job.is_member(worker.name):
        return "this worker is not a member of the current generation"
    if not worker.synced:
        return "this worker has not confirmed that it holds the state"
    newest = job.published.get(asked.file)
    if newest is not None and asked.progress < newest:
        return f"a newer checkpoint, of step {newest.step}, is already published"
    return ""
