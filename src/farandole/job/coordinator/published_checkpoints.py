"""Checkpoints from the coordinator's side: the permission to publish one, and what became of it. Pure."""

from __future__ import annotations

from farandole.base.events.job_events import CheckpointFailed, CheckpointSaved
from farandole.base.wire.link_messages import CheckpointEnded, MayPublish, PublishAnswer
from farandole.job.coordinator.job import Job, Worker
from farandole.job.coordinator.transition import Transition


def may_publish(transition: Transition, worker: Worker, asked: MayPublish) -> None:
    """Answer a worker that asks to publish. Every state that a living member has captured, also before the last
    regroup, is in the past of all members: the source rank was never behind it. So the generation of the checkpoint
    does not matter; the worker only has to be a member now."""
    refusal = _why_not(transition.job, worker, asked)
    if not refusal:
        transition.change(published={**transition.job.published, asked.file: asked.progress})
        if not asked.file:
            # From now on there may be a checkpoint, even if its writer does not live to report it.
            transition.change(has_checkpoint=transition.job.saves)
    transition.send_to_workers([worker.name], PublishAnswer(asked.name, refusal))


def checkpoint_ended(transition: Transition, worker: Worker, message: CheckpointEnded) -> None:
    """Log the result of a checkpoint."""
    if message.error:
        transition.log(CheckpointFailed(worker.name, message.step, message.error))
    else:
        transition.log(CheckpointSaved(worker.name, message.step, message.name, message.took_s))


def _why_not(job: Job, worker: Worker, asked: MayPublish) -> str:
    if not job.is_member(worker.name):
        return "this worker is not a member of the current generation"
    if not worker.synced:
        return "this worker has not confirmed that it holds the state"
    newest = job.published.get(asked.file)
    if newest is not None and asked.progress < newest:
        return f"a newer checkpoint, of step {newest.step}, is already published"
    return ""
