"""From the decision to end a job to its last worker's exit. Only exits and a second Ctrl-C matter now."""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator import publishing
from farandole.coordinator.actions import EndJob
from farandole.coordinator.draft import Draft
from farandole.coordinator.inputs import AgentLost, AgentTold, Input, StopRequested
from farandole.coordinator.job import Worker
from farandole.events import WorkerStacks
from farandole.messages import (
    CheckpointEnded,
    FromWorker,
    JobEnded,
    MayPublish,
    SpawnFailed,
    WorkerExited,
    WorkerMessage,
)

# 128 + SIGINT, as shells have it.
STOPPED_EXIT_CODE = 130


def stop_requested(draft: Draft, input: StopRequested) -> None:
    """A person ends the job: with grace, or at once."""
    draft.end(STOPPED_EXIT_CODE, input.reason, grace_s=0.0 if input.now else None)
    if input.now:
        _wait_no_longer(draft)


def note(draft: Draft, input: Input) -> None:
    """Take note of what happens while the last workers are awaited."""
    match input:
        case AgentTold(agent, WorkerExited() | SpawnFailed() as message):
            if isinstance(message, WorkerExited) and message.stacks:
                draft.log(WorkerStacks(message.worker, message.stacks))
            worker = draft.job.workers.get(message.worker)
            if worker is not None and worker.slot.agent == agent:
                draft.forget([worker.name])
        case AgentTold(agent, FromWorker(name, said)):
            worker = draft.job.workers.get(name)
            if worker is not None and worker.slot.agent == agent:
                _emergency_checkpoint(draft, worker, said)
        case AgentLost(agent):
            known = draft.job.agents.get(agent)
            if known is not None:
                draft.change(agents={**draft.job.agents, agent: replace(known, is_connected=False)})
            draft.forget(name for name, worker in draft.job.workers.items() if worker.slot.agent == agent)
        case StopRequested(now=True):
            for name in draft.job.workers:
                draft.kill(name, 0.0, "the job ends at once")
            _wait_no_longer(draft)
        case _:
            pass


def advance(draft: Draft) -> None:
    """Say that the job is over once nothing of it runs any more, or at the deadline."""
    ending = draft.job.ending
    if ending is None or (draft.job.workers and draft.now_s < ending.deadline_s):
        return
    for agent in draft.job.agents.values():
        if agent.is_connected:
            draft.send(agent.name, JobEnded(ending.exit_code, ending.reason))
    draft.actions.append(EndJob(ending.exit_code, ending.reason))
    draft.change(ending=replace(ending, is_done=True))


def _emergency_checkpoint(draft: Draft, worker: Worker, said: WorkerMessage) -> None:
    match said:
        case MayPublish():
            publishing.may_publish(draft, worker, said)
        case CheckpointEnded():
            publishing.ended(draft, worker, said)


def _wait_no_longer(draft: Draft) -> None:
    if draft.job.ending is not None:
        draft.change(ending=replace(draft.job.ending, deadline_s=draft.now_s))
