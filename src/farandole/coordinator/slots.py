"""The slots of a job: starting workers in them, backing off after failures, and keeping spares. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence

from farandole.coordinator import hosts, recovery
from farandole.coordinator.job import Job, Slot, SlotUse, Worker
from farandole.coordinator.transition import Transition
from farandole.events import (
    ScaleChanged,
    ScaleRefused,
    SlotBackoff,
    SlotsMissing,
    SparesMissing,
    SpareWaits,
    WorkerSpawned,
)
from farandole.wire.messages import Left, Spawn


def scale_requested(transition: Transition, size: int) -> None:
    """Scale the job. Up: free slots are filled. Down: slots are closed, empty and newest ones first."""
    job = transition.job
    low, high = job.config.min_np, job.config.max_np
    if job.is_released or size == (job.most if job.config.fills_slots else job.target):
        return
    if size < low or (high is not None and size > high):
        transition.log(ScaleRefused(size, low, high))
        return
    transition.log(ScaleChanged(job.target, size))
    transition.change(most=size)
    _aim_at(transition, min(size, hosts.worker_capacity(job)) if job.config.fills_slots else size)


def follow_hosts(transition: Transition) -> None:
    """Set the target of a job that fills slots to the number of slots."""
    job = transition.job
    if job.config.fills_slots and not job.is_released:
        most = hosts.worker_capacity(job)
        target = most if job.most is None else min(job.most, most)
        if target != job.target:
            _aim_at(transition, target)


def wants_more(job: Job) -> bool:
    """Return whether the job wants more members than it has, and has not opened slots for all of them."""
    staying = [worker for worker in job.survivors() if not worker.is_leaving]
    return len(staying) < job.target and _open(job) < slots_wanted(job)


def close(transition: Transition, slot: Slot) -> None:
    """Close the slot: its worker, if any, is not replaced."""
    transition.change_slot(slot, is_open=False, is_held_back=False)


def vacate(transition: Transition, slot: Slot, reason: str) -> str | None:
    """Close a slot that may have a worker. A member leaves at the next boundary; any other worker is stopped at once.
    Return the worker's name if this call makes it leave."""
    worker = _occupants(transition.job).get(slot)
    close(transition, slot)
    if worker is None or worker.is_leaving or worker.has_left or worker.is_dying or worker.killed_for:
        return None
    if transition.job.is_member(worker.name):
        transition.change_worker(worker.name, is_leaving=True)
    else:
        let_go(transition, worker, reason)
    return worker.name


def let_go(transition: Transition, worker: Worker, reason: str) -> None:
    """End a worker that is not a member. A worker that waits to be admitted is told so, and exits by itself."""
    grace_s = transition.job.config.grace_s
    if worker.is_elastic and worker.raised is None:
        transition.send_to_workers([worker.name], Left())
        transition.change_worker(worker.name, has_left=True, kill_at_s=transition.now_s + grace_s)
    else:
        transition.kill(worker.name, grace_s, reason)


def release_held_back(transition: Transition) -> None:
    """Let slots be filled again whose workers raised an exception, since the members continue."""
    for slot, use in transition.job.slots.items():
        if use.is_held_back:
            transition.change_slot(slot, is_held_back=False)
    fill(transition)


def warn_of_missing(transition: Transition) -> None:
    """Warn, once, that there are fewer slots than workers wanted: the job waits, or continues with fewer."""
    job = transition.job
    if job.is_finishing or job.is_released or not (job.agents or job.offers):
        return
    is_start = job.generation is None
    wanted = max(job.target, job.config.num_proc) if job.config.fills_slots and is_start else job.target
    missing = max(0, wanted - hosts.worker_capacity(job))
    if missing > job.missing_slots:
        ends_in_s = job.start_deadline_s - transition.now_s if is_start and job.start_deadline_s is not None else None
        transition.log(SlotsMissing(missing, wanted, ends_in_s))
    transition.change(missing_slots=missing)


def restarts_left(job: Job, slot: Slot) -> int:
    """Return how often the worker in this slot may still be replaced."""
    use = job.slots[slot]
    return max(0, job.config.restarts - use.restarts) if use.is_open else 0


def fill(transition: Transition) -> None:
    """Start workers in wanted slots that are empty. A slot is free only once its worker is reaped."""
    if transition.job.is_released:
        return
    new = [*_refill(transition), *_open_more(transition)]
    for worker in new:
        _spawn(transition, worker)


def _refill(transition: Transition) -> list[str]:
    """Replace lost workers within their slots' budgets."""
    new, occupied = list[str](), _occupants(transition.job)
    if recovery.defers_restarts(transition.job):
        return new
    for slot, use in transition.job.slots.items():
        vacant = use.is_open and not use.is_held_back and use.backoff_until_s is None and slot not in occupied
        if vacant and use.restarts < transition.job.config.restarts and _admits(transition.job):
            transition.change_slot(slot, restarts=use.restarts + 1)
            new.append(_add_worker(transition, slot, is_awaited=False))
    return new


def _open_more(transition: Transition) -> list[str]:
    """Open slots until there are as many as the job wants workers, host by host."""
    job, new = transition.job, list[str]()
    missing, missing_members = slots_wanted(job) - _open(job), job.target - _open(job)
    if missing <= 0 or (job.config.fills_slots and job.generation is not None and not job.is_elastic):
        return new  # A script that has not entered an elastic function cannot admit workers.
    in_use = {slot for slot, use in job.slots.items() if use.is_open} | _occupants(job).keys()
    free = [each.slot for each in hosts.slot_candidates(job) if each.slot is None or each.slot not in in_use]
    waits = job.config.waits_for_newcomers and job.generation is not None
    for place, slot in enumerate(free[:missing]):
        if slot is not None and _admits(transition.job):
            restarts = job.slots[slot].restarts if slot in job.slots else 0
            transition.change(slots={**transition.job.slots, slot: SlotUse(restarts=restarts)})
            new.append(_add_worker(transition, slot, is_awaited=waits and place < missing_members))
    return new


def _add_worker(transition: Transition, slot: Slot, is_awaited: bool) -> str:
    job = transition.job
    worker = Worker(f"w{job.spawned}", slot, is_awaited=is_awaited)
    transition.change(workers={**job.workers, worker.name: worker}, spawned=job.spawned + 1)
    return worker.name


def _spawn(transition: Transition, name: str) -> None:
    job = transition.job
    worker = job.workers[name]
    slot = worker.slot
    transition.send(slot.agent, Spawn(name, slot.index, hosts.expected_placement(job, worker)))
    restart = job.slots[slot].restarts
    transition.log(WorkerSpawned(name, slot.index, job.host_of(worker), restart, job.config.restarts))


def _aim_at(transition: Transition, size: int) -> None:
    """Set the size of the job to `size` workers: members beyond that leave, the most dispensable ones first."""
    transition.change(target=size)
    reason = f"the target size of the job is {size} workers"
    staying = [worker for worker in transition.job.survivors() if not worker.is_leaving]
    for worker in staying[size:]:
        vacate(transition, worker.slot, reason)
    for slot in _dispensable(transition.job)[: max(0, _open(transition.job) - slots_wanted(transition.job))]:
        vacate(transition, slot, reason)


def _admits(job: Job) -> bool:
    """Return whether workers may still be started: after the first Finished none is, unless the job could not continue
    otherwise."""
    if not job.is_finishing:
        return True
    staying = [worker for worker in job.survivors() if not worker.is_leaving]
    return len(staying) + len(job.newcomers()) < job.config.min_np


def _occupants(job: Job) -> dict[Slot, Worker]:
    return {worker.slot: worker for worker in job.workers.values()}


def _open(job: Job) -> int:
    return sum(use.is_open for use in job.slots.values())


def _dispensable(job: Job) -> Sequence[Slot]:
    """Return the open slots, the most dispensable ones first."""
    occupants = _occupants(job)
    ranks = {name: rank for rank, name in enumerate(job.generation.members)} if job.generation else {}

    def use_of(slot: Slot) -> tuple[int, int, int]:
        worker = occupants.get(slot)
        if worker is None:
            return (0, 0, -slot.index)
        return (1 if worker.name not in ranks else 2, -ranks.get(worker.name, 0), -slot.index)

    return sorted((slot for slot, use in job.slots.items() if use.is_open), key=use_of)


# Backoff: a broken device must not cost the others a regroup every few seconds ----------------------------------------
#
# A healthy worker is always replaced at once: a worker that lived for HEALTHY_S inside its elastic function, or that
# held the state and was killed by SIGKILL, which its own code never does. The first unhealthy worker is replaced at
# once, too. From the second in a row on the slot stays empty for FIRST_BACKOFF_S, then for twice as long with each
# further one, up to LONGEST_BACKOFF_S.

HEALTHY_S = 1.0
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


def backoff_s(failures: int) -> float:
    """Return how long, in seconds, a slot stays empty after this many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 2, 30))


def count_failure(transition: Transition, worker: Worker, exit_code: int | None) -> None:
    """Count the loss of a slot's worker that was not asked to leave. A failure of the host does not count against the
    slot."""
    job, slot = transition.job, worker.slot
    use = job.slots.get(slot)
    if use is None or not use.is_open or not job.agents[slot.agent].is_connected:
        return
    if _was_healthy(worker, exit_code, transition.now_s):
        transition.change_slot(slot, failures=0)
        return
    failures = use.failures + 1
    transition.change_slot(slot, failures=failures)
    if (pause := backoff_s(failures)) and use.restarts < job.config.restarts:
        transition.change_slot(slot, backoff_until_s=transition.now_s + pause)
        transition.log(SlotBackoff(slot.index, job.host(slot), failures, pause))


def _was_healthy(worker: Worker, exit_code: int | None, now_s: float) -> bool:
    if worker.elastic_s is None:
        return False
    was_killed = exit_code == -signal.SIGKILL and not worker.killed_for
    return now_s - worker.elastic_s >= HEALTHY_S or (was_killed and worker.synced > 0)


def end_backoffs(transition: Transition) -> None:
    """Let slots be filled again whose backoff is over."""
    for slot, use in transition.job.slots.items():
        if use.backoff_until_s is not None and transition.now_s >= use.backoff_until_s:
            transition.change_slot(slot, backoff_until_s=None)


def backoff_deadline(job: Job) -> float | None:
    """Return when the next slot may be filled again."""
    return min((use.backoff_until_s for use in job.slots.values() if use.backoff_until_s is not None), default=None)


# Spares: workers beyond the training ones, which wait, READY for any generation, until a member is lost ---------------
#
# A spare is a newcomer for which there is no rank yet. No worker is a spare by name: when a generation starts with as
# many members as the job wants, the remaining newcomers wait on. So a loss and its replacement are one regroup, and
# the worker that is started in the lost worker's slot is the next spare.


def slots_wanted(job: Job) -> int:
    """Return in how many slots the job wants to have a worker. A script that has not entered an elastic function cannot
    admit workers: until then no spare is started, since it would slow down the start of the others."""
    return job.target + (job.spares if job.is_elastic else 0)


def most_members(job: Job) -> int | None:
    """Return the largest number of members that the next generation may reach by admitting newcomers; None: any
    number."""
    most = job.config.max_np
    if not job.config.spares:
        return most
    # To avoid an end for lack of workers, members that were asked to leave are replaced as well.
    wanted = max(job.target, job.config.min_np)
    return wanted if most is None else min(most, wanted)


def choose_newcomers(job: Job, staying: Sequence[Worker], room: int) -> list[Worker]:
    """Return the newcomers that the next generation admits, at most `room`. Each is taken from the host that has the
    fewest members, so that the loss of a host costs as few as possible."""
    waiting, chosen = job.candidates(), list[Worker]()
    members = Counter(job.host_of(worker) for worker in staying)
    while waiting and len(chosen) < room:
        best = min(waiting, key=lambda worker: members[job.host_of(worker)])  # the first slot among equals
        waiting.remove(best)
        chosen.append(best)
        members[job.host_of(best)] += 1
    return sorted(chosen, key=job.slot_order)


def report_spare(transition: Transition, worker: Worker) -> None:
    """Report a newcomer that has no rank among the members and waits."""
    job = transition.job
    staying = [member for member in job.survivors() if not member.is_leaving]
    is_full = job.change is None and len(staying) >= job.target
    if job.spares and is_full and not job.is_member(worker.name):
        transition.log(SpareWaits(worker.name, worker.slot.index, job.host_of(worker)))


def warn_of_missing_spares(transition: Transition) -> None:
    """Warn, once, that there is no slot for some of the spares."""
    job = transition.job
    if not (job.is_elastic and job.spares) or job.is_released:
        return
    missing = min(job.spares, max(0, slots_wanted(job) - hosts.worker_capacity(job)))
    if missing > job.missing_spares:
        transition.log(SparesMissing(job.spares, missing))
    transition.change(missing_spares=missing)
