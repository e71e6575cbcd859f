"""The end of a job, from the decision to its last worker's exit. Only exits and a second Ctrl-C matter now."""

from __future__ import annotations

from dataclasses import replace

from farandole.coordinator import checkpoint_publishing
from farandole.coordinator.actions import EndJob
from farandole.coordinator.inputs import AgentLost, AgentTold, Input, StopRequested
from farandole.coordinator.job import Worker
from farandole.coordinator.transition import Transition
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

# 128 + SIGINT, as in shells.
STOPPED_EXIT_CODE = 130


def stop_requested(transition: Transition, input: StopRequested) -> None:
    """End the job on the user's request: with grace, or at once."""
    transition.end(STOPPED_EXIT_CODE, input.reason, grace_s=0.0 if input.now else None)
    if input.now:
        _wait_no_longer(transition)


def record(transition: Transition, input: Input) -> None:
    """Record events that arrive while the last workers are awaited."""
    match input:
        case AgentTold(agent, WorkerExited() | SpawnFailed() as message):
            if isinstance(message, WorkerExited) and message.stacks:
                transition.log(WorkerStacks(message.worker, message.stacks))
            worker = transition.job.workers.get(message.worker)
            if worker is not None and worker.slot.agent == agent:
                transition.forget([worker.name])
        case AgentTold(agent, FromWorker(name, payload)):
            worker = transition.job.workers.get(name)
            if worker is not None and worker.slot.agent == agent:
                _emergency_checkpoint(transition, worker, payload)
        case AgentLost(agent):
            known = transition.job.agents.get(agent)
            if known is not None:
                transition.change(agents={**transition.job.agents, agent: replace(known, is_connected=False)})
            transition.forget(name for name, worker in transition.job.workers.items() if worker.slot.agent == agent)
        case StopRequested(now=True):
            for name in transition.job.workers:
                transition.kill(name, 0.0, "the job ends at once")
            _wait_no_longer(transition)
        case _:
            pass


def advance(transition: Transition) -> None:
    """End the job once none of its processes runs any more, or at the deadline."""
    ending = transition.job.ending
    if ending is None or (transition.job.workers and transition.now_s < ending.deadline_s):
        return
    for agent in transition.job.agents.values():
        if agent.is_connected:
            transition.send(agent.name, JobEnded(ending.exit_code, ending.reason))
    transition.actions.append(EndJob(ending.exit_code, ending.reason))
    transition.change(ending=replace(ending, is_done=True))


def _emergency_checkpoint(transition: Transition, worker: Worker, payload: WorkerMessage) -> None:
    match payload:
        case MayPublish():
            checkpoint_publishing.may_publish(transition, worker, payload)
        case CheckpointEnded():
            checkpoint_publishing.ended(transition, worker, payload)


def _wait_no_longer(transition: Transition) -> None:
    if transition.job.ending is not None:
        transition.change(ending=replace(transition.job.ending, deadline_s=transition.now_s))
