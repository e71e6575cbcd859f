"""Which slots get a worker: when hosts come, when a worker has to be replaced, when the job is scaled."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.coordinator import rooms, spares, survivors_first
from farandole.coordinator.draft import Draft
from farandole.coordinator.job import Job, Slot, SlotUse, Worker
from farandole.events import ScaleChanged, ScaleRefused, SlotsMissing, WorkerSpawned
from farandole.messages import Left, Spawn


def scale_requested(draft: Draft, size: int) -> None:
    """More: free slots are filled. Fewer: slots are closed, empty and newest ones first."""
    job = draft.job
    low, high = job.config.min_np, job.config.max_np
    if job.is_released or size == (job.most if job.config.fills_slots else job.target):
        return
    if size < low or (high is not None and size > high):
        draft.log(ScaleRefused(size, low, high))
        return
    draft.log(ScaleChanged(job.target, size))
    draft.change(most=size)
    _aim_at(draft, min(size, rooms.capacity(job)) if job.config.fills_slots else size)


def follow_hosts(draft: Draft) -> None:
    """A job that fills slots wants as many workers as there are slots."""
    job = draft.job
    if job.config.fills_slots and not job.is_released:
        capacity = rooms.capacity(job)
        target = capacity if job.most is None else min(job.most, capacity)
        if target != job.target:
            _aim_at(draft, target)


def wants_more(job: Job) -> bool:
    """Whether the job wants more members than it has, and has not opened slots for all it wants."""
    staying = [worker for worker in job.survivors() if not worker.is_leaving]
    return len(staying) < job.target and _open(job) < spares.slots_wanted(job)


def close(draft: Draft, slot: Slot) -> None:
    """No worker is wanted in this slot any more; the one in it, if any, is not replaced."""
    draft.change_slot(slot, is_open=False, is_held_back=False)


def vacate(draft: Draft, slot: Slot, reason: str) -> str | None:
    """Close a slot that may have a worker. A member leaves at the next boundary, anybody else is stopped at once.
    Gives the worker's name, if it is this that makes it go."""
    worker = _occupants(draft.job).get(slot)
    close(draft, slot)
    if worker is None or worker.is_leaving or worker.has_left or worker.is_dying or worker.killed_for:
        return None
    if draft.job.is_member(worker.name):
        draft.change_worker(worker.name, is_leaving=True)
    else:
        let_go(draft, worker, reason)
    return worker.name


def let_go(draft: Draft, worker: Worker, reason: str) -> None:
    """End a worker that is no member. One that waits to be admitted is told so, and exits by itself."""
    grace_s = draft.job.config.grace_s
    if worker.is_elastic and worker.raised is None:
        draft.tell([worker.name], Left())
        draft.change_worker(worker.name, has_left=True, kill_at_s=draft.now_s + grace_s)
    else:
        draft.kill(worker.name, grace_s, reason)


def release_held_back(draft: Draft) -> None:
    """The members go on: slots whose workers raised an exception may be filled again."""
    for slot, use in draft.job.slots.items():
        if use.is_held_back:
            draft.change_slot(slot, is_held_back=False)
    fill(draft)


def warn_of_missing(draft: Draft) -> None:
    """Tell people, once, that there are fewer slots than workers wanted: the job waits, or goes on with fewer."""
    job = draft.job
    if job.is_finishing or job.is_released or not (job.agents or job.offers):
        return
    is_start = job.generation is None
    wanted = max(job.target, job.config.num_proc) if job.config.fills_slots and is_start else job.target
    missing = max(0, wanted - rooms.capacity(job))
    if missing > job.missing_slots:
        ends_in_s = job.start_deadline_s - draft.now_s if is_start and job.start_deadline_s is not None else None
        draft.log(SlotsMissing(missing, wanted, ends_in_s))
    draft.change(missing_slots=missing)


def restarts_left(job: Job, slot: Slot) -> int:
    """How often the worker in this slot may still be replaced."""
    use = job.slots[slot]
    return max(0, job.config.restarts - use.restarts) if use.is_open else 0


def fill(draft: Draft) -> None:
    """Start workers where they are wanted and nothing runs. A slot is free only once its worker is reaped."""
    if draft.job.is_released:
        return
    new = [*_refill(draft), *_open_more(draft)]
    for worker in new:
        _spawn(draft, worker)


def _refill(draft: Draft) -> list[str]:
    """Replace lost workers within their slots' budgets."""
    new, occupied = list[str](), _occupants(draft.job)
    if survivors_first.is_on(draft.job):
        return new
    for slot, use in draft.job.slots.items():
        vacant = use.is_open and not use.is_held_back and use.rests_until_s is None and slot not in occupied
        if vacant and use.restarts < draft.job.config.restarts and _admits(draft.job):
            draft.change_slot(slot, restarts=use.restarts + 1)
            new.append(_add_worker(draft, slot, is_awaited=False))
    return new


def _open_more(draft: Draft) -> list[str]:
    """Open slots until there are as many as the job wants workers, host by host."""
    job, new = draft.job, list[str]()
    missing, missing_members = spares.slots_wanted(job) - _open(job), job.target - _open(job)
    if missing <= 0 or (job.config.fills_slots and job.generation is not None and not job.is_elastic):
        return new  # A script that has not entered an elastic function cannot take anybody in.
    in_use = {slot for slot, use in job.slots.items() if use.is_open} | _occupants(job).keys()
    free = [room.slot for room in rooms.in_order(job) if room.slot is None or room.slot not in in_use]
    waits = job.config.waits_for_newcomers and job.generation is not None
    for place, slot in enumerate(free[:missing]):
        if slot is not None and _admits(draft.job):
            restarts = job.slots[slot].restarts if slot in job.slots else 0
            draft.change(slots={**draft.job.slots, slot: SlotUse(restarts=restarts)})
            new.append(_add_worker(draft, slot, is_awaited=waits and place < missing_members))
    return new


def _add_worker(draft: Draft, slot: Slot, is_awaited: bool) -> str:
    job = draft.job
    worker = Worker(f"w{job.spawned}", slot, is_awaited=is_awaited)
    draft.change(workers={**job.workers, worker.name: worker}, spawned=job.spawned + 1)
    return worker.name


def _spawn(draft: Draft, name: str) -> None:
    job = draft.job
    worker = job.workers[name]
    slot = worker.slot
    draft.send(slot.agent, Spawn(name, slot.index, rooms.expected_place(job, worker)))
    restart = job.slots[slot].restarts
    draft.log(WorkerSpawned(name, slot.index, job.host_of(worker), restart, job.config.restarts))


def _aim_at(draft: Draft, size: int) -> None:
    """From now on the job should have `size` workers: members beyond that go, and then those that are missed least."""
    draft.change(target=size)
    reason = f"the job is to have {size} workers"
    staying = [worker for worker in draft.job.survivors() if not worker.is_leaving]
    for worker in staying[size:]:
        vacate(draft, worker.slot, reason)
    for slot in _dispensable(draft.job)[: max(0, _open(draft.job) - spares.slots_wanted(draft.job))]:
        vacate(draft, slot, reason)


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


def _dispensable(job: Job) -> Sequence[Slot]:
    """Open slots, those that are missed least first."""
    occupants = _occupants(job)
    ranks = {name: rank for rank, name in enumerate(job.generation.members)} if job.generation else {}

    def use_of(slot: Slot) -> tuple[int, int, int]:
        worker = occupants.get(slot)
        if worker is None:
            return (0, 0, -slot.index)
        return (1 if worker.name not in ranks else 2, -ranks.get(worker.name, 0), -slot.index)

    return sorted((slot for slot, use in job.slots.items() if use.is_open), key=use_of)
