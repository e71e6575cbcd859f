"""Which slots get a worker: when agents join, when a worker has to be replaced, when the job is scaled."""

from __future__ import annotations

from farandole.coordinator.assignment import free_slots
from farandole.coordinator.draft import Draft
from farandole.coordinator.inputs import AgentConnected
from farandole.coordinator.job import Agent, Job, Slot, SlotUse, Worker
from farandole.events import AgentJoined, ScaleChanged, ScaleRefused, WorkerSpawned
from farandole.messages import Spawn


def agent_connected(draft: Draft, input: AgentConnected) -> None:
    """An agent that was lost may come back: it ended its old workers, so its slots are empty."""
    agents = draft.job.agents
    known = agents.get(input.agent)
    if (known is not None and known.is_connected) or input.slots < 0:
        return
    agent = Agent(input.agent, input.host, input.slots, order=known.order if known else len(agents))
    draft.change(agents={**agents, agent.name: agent})
    draft.log(AgentJoined(agent.name, agent.host, agent.slots))


def scale_requested(draft: Draft, size: int) -> None:
    """More: free slots are filled. Fewer: slots are closed, empty and newest ones first."""
    job = draft.job
    low, high = job.config.min_np, job.config.max_np
    if job.is_released or size == job.target:
        return
    if size < low or (high is not None and size > high):
        draft.log(ScaleRefused(size, low, high))
        return
    draft.log(ScaleChanged(job.target, size))
    draft.change(target=size)
    for slot in _dispensable(job)[: max(0, _open(job) - size)]:
        worker = _occupants(job).get(slot)
        close(draft, slot)
        if worker is not None and job.is_member(worker.name):
            draft.change_worker(worker.name, is_leaving=True)
        elif worker is not None:
            draft.kill(worker.name, job.config.grace_s, f"the job was asked to have {size} workers")


def close(draft: Draft, slot: Slot) -> None:
    """No worker is wanted in this slot any more; the one in it, if any, is not replaced."""
    draft.change_slot(slot, is_open=False, is_held_back=False)


def release_held_back(draft: Draft) -> None:
    """The members go on: slots whose workers raised an exception may be filled again."""
    for slot, use in draft.job.slots.items():
        if use.is_held_back:
            draft.change_slot(slot, is_held_back=False)
    fill(draft)


def restarts_left(job: Job, slot: Slot) -> int:
    """How often the worker in this slot may still be replaced."""
    use = job.slots[slot]
    return max(0, job.config.restarts - use.restarts) if use.is_open else 0


def fill(draft: Draft) -> None:
    """Start workers where they are wanted and nothing runs. A slot is free only once its worker is reaped."""
    if draft.job.is_released:
        return
    occupied = _occupants(draft.job)
    for slot, use in draft.job.slots.items():
        vacant = use.is_open and not use.is_held_back and slot not in occupied
        if vacant and use.restarts < draft.job.config.restarts and _admits(draft.job):
            draft.change_slot(slot, restarts=use.restarts + 1)
            _spawn(draft, slot)
    missing = draft.job.target - _open(draft.job)
    if missing > 0:
        in_use = {slot for slot, use in draft.job.slots.items() if use.is_open} | occupied.keys()
        for slot in [*free_slots(draft.job.agents.values(), in_use)][:missing]:
            if _admits(draft.job):
                restarts = draft.job.slots[slot].restarts if slot in draft.job.slots else 0
                draft.change(slots={**draft.job.slots, slot: SlotUse(restarts=restarts)})
                _spawn(draft, slot)


def _spawn(draft: Draft, slot: Slot) -> None:
    job = draft.job
    worker = Worker(f"w{job.spawned}", slot)
    draft.change(workers={**job.workers, worker.name: worker}, spawned=job.spawned + 1)
    draft.send(slot.agent, Spawn(worker.name, slot.index))
    restart = job.slots[slot].restarts
    draft.log(WorkerSpawned(worker.name, slot.index, job.host_of(worker), restart, job.config.restarts))


def _admits(job: Job) -> bool:
    """From the first Finished on nobody is started any more, unless the job could not go on otherwise."""
    if not job.is_finishing:
        return True
    staying = [worker for worker in job.survivors() if not worker.is_leaving]
    return len(staying) + len(job.newcomers()) < job.config.min_np


def _occupants(job: Job) -> dict[Slot, Worker]:
    return {worker.slot: worker for worker in job.workers.values()}


def _open(job: Job) -> int:
    return sum(use.is_open for use in job.slots.values())


def _dispensable(job: Job) -> list[Slot]:
    """Open slots, those that are missed least first."""
    occupants = _occupants(job)
    ranks = {name: rank for rank, name in enumerate(job.generation.members)} if job.generation else {}

    def use_of(slot: Slot) -> tuple[int, int, int]:
        worker = occupants.get(slot)
        if worker is None:
            return (0, 0, -slot.index)
        return (1 if worker.name not in ranks else 2, -ranks.get(worker.name, 0), -slot.index)

    return sorted((slot for slot, use in job.slots.items() if use.is_open), key=use_of)
