"""The slots of a job: starting workers in them, keeping spares, the places of workers and of members. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from farandole.base.events.job_events import NumberOfWorkersFixed, NumberOfWorkersFreed, ScaleChanged, ScaleRefused
from farandole.base.events.worker_events import SlotsMissing, SparesMissing, SpareWaits, WorkerSpawned
from farandole.base.membership import DataAddress, Peer, Placement
from farandole.base.wire.link_messages import Left
from farandole.base.wire.messages import Spawn
from farandole.job.coordinator.job import Job, Offer, Slot, Worker
from farandole.job.coordinator.transition import Transition


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
    _aim_at(transition, min(size, worker_capacity(job)) if job.config.fills_slots else size)


def fix_workers(transition: Transition, number: int, because: str) -> None:
    """Let the job train with this number of workers only, as long as there can be so many."""
    job = transition.job
    if job.fixed_because or job.static_because or job.is_released:
        return
    config = replace(job.config, num_proc=number, min_np=number, max_np=number)
    transition.change(fixed_because=because, free_config=job.config, config=config, most=number)
    transition.log(NumberOfWorkersFixed(number, because))
    if job.target > number:
        _aim_at(transition, number)
    members = job.generation.members if job.generation is not None else ()
    if len(members) < number and job.change is None and not job.is_finishing:
        transition.faults.append(f"each step needs {number} workers")


def free_workers(transition: Transition) -> bool:
    """Let a job with a fixed number of workers go on with fewer. Returns whether it was one."""
    job = transition.job
    if job.free_config is None:
        return False
    transition.log(NumberOfWorkersFreed(job.config.min_np))
    transition.change(config=job.free_config, free_config=None, most=job.free_config.max_np)
    return True


def follow_hosts(transition: Transition) -> None:
    """Set the target of a job that fills slots to the number of slots."""
    job = transition.job
    if job.config.fills_slots and not job.is_released:
        most = worker_capacity(job)
        target = most if job.most is None else min(job.most, most)
        if target != job.target:
            _aim_at(transition, target)


def wants_more(job: Job) -> bool:
    """Return whether the job wants more members than it has, and has not opened slots for all of them."""
    return len(job.staying()) < job.target and open_slots(job) < slots_wanted(job)


def close_slot(transition: Transition, slot: Slot) -> None:
    """Close the slot: its worker, if any, is not replaced."""
    transition.change_slot(slot, is_open=False, is_held_back=False)


def vacate_slot(transition: Transition, slot: Slot, worker: Worker | None, reason: str) -> str | None:
    """Close a slot that may have a `worker`. A member leaves at the next boundary; any other worker is stopped at once.
    Return the worker's name if this call makes it leave."""
    close_slot(transition, slot)
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
    if job.is_finishing or job.is_released or job.static_because or not (job.agents or job.offers):
        return
    is_start = job.generation is None
    wanted = job.needed_at_start if is_start else job.target
    missing = max(0, wanted - worker_capacity(job))
    if missing > job.missing_slots:
        ends_in_s = job.start_deadline_s - transition.now_s if is_start and job.start_deadline_s is not None else None
        transition.log(SlotsMissing(missing, wanted, ends_in_s))
    transition.change(missing_slots=missing)


def restarts_left(job: Job, slot: Slot) -> int:
    use = job.slots[slot]
    return max(0, job.config.restarts - use.restarts) if use.is_open else 0


def fill(transition: Transition) -> None:
    """Start workers in wanted slots that are empty. A slot is free only once its worker is reaped."""
    job = transition.job
    if job.is_released or job.whole_restart is not None or _may_not_start_together(transition):
        return
    new = [*_refill(transition), *_open_more(transition)]
    if new:
        _spawn(transition, new)


def usable_slots(job: Job) -> int:
    """Return the number of slots in which workers can be started now."""
    usable = {
        agent.name: agent.slots
        for agent in job.agents.values()
        if agent.is_connected and not agent.is_draining and not job.is_banned(agent.host)
    }
    given_up = sum(use.is_given_up and slot.index < usable.get(slot.agent, 0) for slot, use in job.slots.items())
    return sum(usable.values()) - given_up


def last_call_deadline(job: Job) -> float | None:
    """Return when workers that start together do not wait for further hosts any more."""
    return None if job.enough_since_s is None else job.enough_since_s + job.config.last_call_s


def count_slots_for_all(transition: Transition) -> None:
    """Note since when workers that start together in all slots have enough of them, which begins the last call."""
    job = transition.job
    waits = job.config.max_restarts is not None and job.config.fills_slots and job.config.last_call_s > 0
    may_start = job.generation is None and job.whole_restart is None and not (job.workers or job.plain_exits)
    if not (waits and may_start and usable_slots(job) >= job.needed_at_start):
        transition.change(enough_since_s=None)
    elif job.enough_since_s is None:
        transition.change(enough_since_s=transition.now_s)


def _may_not_start_together(transition: Transition) -> bool:
    """Return whether workers that are restarted as a whole cannot be started as a whole now: some have been already, or
    there are too few slots. A script that reads its rank and the number of ranks before init() gets both right only if
    all slots are known."""
    job = transition.job
    if job.config.max_restarts is None or job.generation is not None:
        return False
    if job.workers or job.plain_exits:
        return True
    usable = usable_slots(job)
    if usable < job.needed_at_start:
        return True
    until_s = last_call_deadline(job)
    return until_s is not None and transition.now_s < until_s and (job.most is None or usable < job.most)


def _refill(transition: Transition) -> list[str]:
    """Replace lost workers within their slots' budgets."""
    new, occupied = list[str](), workers_by_slot(transition.job)
    staying = len(transition.job.staying())
    if transition.job.restart_deferred_until_s is not None and staying >= max(1, transition.job.config.min_np):
        return new  # They train first (regroup.py).
    for slot, use in transition.job.slots.items():
        vacant = use.is_open and not use.is_held_back and use.backoff_until_s is None and slot not in occupied
        if vacant and use.restarts < transition.job.config.restarts and _admits(transition.job):
            transition.change_slot(slot, restarts=use.restarts + 1)
            new.append(_add_worker(transition, slot, is_awaited=False))
    return new


def _open_more(transition: Transition) -> list[str]:
    """Open slots until there are as many as the job wants workers, host by host."""
    job, new = transition.job, list[str]()
    missing, missing_members = slots_wanted(job) - open_slots(job), job.target - open_slots(job)
    if missing <= 0 or (job.config.fills_slots and job.generation is not None and not job.is_elastic):
        return new  # A script that has not entered an elastic function cannot admit workers.
    in_use = {slot for slot, use in job.slots.items() if use.is_open} | workers_by_slot(job).keys()
    free = [each.slot for each in slot_candidates(job) if each.slot is None or each.slot not in in_use]
    waits = job.config.waits_for_newcomers and job.generation is not None
    for place, slot in enumerate(free[:missing]):
        if slot is not None and _admits(transition.job):
            restarts = job.slots[slot].restarts if slot in job.slots else 0
            transition.open_slot(slot, restarts)
            new.append(_add_worker(transition, slot, is_awaited=waits and place < missing_members))
    return new


def _add_worker(transition: Transition, slot: Slot, is_awaited: bool) -> str:
    job = transition.job
    worker = Worker(f"w{job.spawned}", slot, is_awaited=is_awaited)
    transition.add_worker(worker)
    transition.change(spawned=job.spawned + 1)
    return worker.name


def _spawn(transition: Transition, names: Sequence[str]) -> None:
    """Order the start of workers, each for the place that it will most likely get."""
    job = transition.job
    expected, ranks = expected_slots(job)
    places = placements(expected)
    groups = {host: group for group, host in enumerate(dict.fromkeys(host for host, _ in expected))}
    for name in names:
        worker = job.workers[name]
        slot = worker.slot
        host, number = job.host_of(worker), number_on_host(job, slot)
        if slot in ranks:
            place, size, group_rank, group_size = places[ranks[slot]], len(expected), groups[host], len(groups)
        else:  # beyond the workers with which the training begins
            place, size = placements([*expected, (host, number)])[-1], len(expected) + 1
            group_rank, group_size = groups.get(host, len(groups)), len({*groups, host})
        # The script may choose its device before it is admitted, when a live worker may have each lower number.
        place = msgspec.structs.replace(place, local_rank=number, local_size=max(place.local_size, number + 1))
        if job.generation is None:
            place = msgspec.structs.replace(place, size=max(size, job.target))
        transition.change_worker(name, place=place)
        transition.send(slot.agent, Spawn(name, slot.index, place, job.attempt, group_rank, group_size))
        transition.log(
            WorkerSpawned(
                name,
                slot.index,
                host,
                job.slots[slot].restarts,
                job.config.restarts,
                place.rank,
                place.local_rank,
                job.attempt,
            )
        )


def _aim_at(transition: Transition, size: int) -> None:
    """Set the size of the job to `size` workers: members beyond that leave, the most dispensable ones first."""
    transition.change(target=size)
    reason = f"the target size of the job is {size} workers"
    for worker in transition.job.staying()[size:]:
        vacate_slot(transition, worker.slot, worker, reason)
    occupants = workers_by_slot(transition.job)
    for slot in _dispensable(transition.job)[: max(0, open_slots(transition.job) - slots_wanted(transition.job))]:
        vacate_slot(transition, slot, occupants.get(slot), reason)


def _admits(job: Job) -> bool:
    """Return whether workers may still be started: none in a job that has become static, and after the first Finished
    none unless the job could not continue otherwise."""
    if job.static_because:
        return False
    if not job.is_finishing:
        return True
    return len(job.staying()) + len(job.newcomers()) < job.config.min_np


def workers_by_slot(job: Job) -> dict[Slot, Worker]:
    return {worker.slot: worker for worker in job.workers.values()}


def open_slots(job: Job) -> int:
    return sum(use.is_open for use in job.slots.values())


def _dispensable(job: Job) -> Sequence[Slot]:
    """Return the open slots, the most dispensable ones first."""
    occupants = workers_by_slot(job)
    ranks = {name: rank for rank, name in enumerate(job.generation.members)} if job.generation else {}

    def use_of(slot: Slot) -> tuple[int, int, int]:
        worker = occupants.get(slot)
        if worker is None:
            return (0, 0, -slot.index)
        return (1 if worker.name not in ranks else 2, -ranks.get(worker.name, 0), -slot.index)

    return sorted((slot for slot, use in job.slots.items() if use.is_open), key=use_of)


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
    if not job.spares or job.change is not None or job.is_member(worker.name):
        return
    if len(job.staying()) >= job.target:
        transition.log(SpareWaits(worker.name, worker.slot.index, job.host_of(worker)))


def warn_of_missing_spares(transition: Transition) -> None:
    job = transition.job
    if not (job.is_elastic and job.spares) or job.is_released:
        return
    missing = min(job.spares, max(0, slots_wanted(job) - worker_capacity(job)))
    if missing > job.missing_spares:
        transition.log(SparesMissing(job.spares, missing))
    transition.change(missing_spares=missing)


# The capacity of the job: the slots of the hosts that may be used, and the placements of workers ----------------------


@dataclass(frozen=True, order=True)
class SlotCandidate:
    """A slot that a worker could get, sorted as ranks are assigned at the start. `slot` is None until the agent of the
    host has joined."""

    order: int
    index: int
    host: str
    slot: Slot | None = None


def slot_candidates(job: Job) -> list[SlotCandidate]:
    """Return a candidate for each usable slot, host by host, the oldest host first.

    Until the first generation the candidates include the reserved slots, whose agents have not joined yet.
    """
    candidates = [
        SlotCandidate(agent.order, index, agent.host, Slot(agent.name, index))
        for agent in job.agents.values()
        if agent.is_connected and not agent.is_draining and not job.is_banned(agent.host)
        for index in range(agent.slots)
    ]
    candidates += [
        SlotCandidate(offer.order, index, host)
        for host, offer in _reserved(job).items()
        for index in range(offer.slots)
    ]
    given_up = {slot for slot, use in job.slots.items() if use.is_given_up}
    return sorted((each for each in candidates if each.slot not in given_up), key=lambda each: (each.order, each.index))


def _reserved(job: Job) -> Mapping[str, Offer]:
    """Return the known hosts whose agents have not joined yet, until the first generation: whichever agent connects
    first, the ranks follow the order in which the hosts were given."""
    if job.generation is not None:
        return {}
    known = job.first_hosts if job.offers is None else job.offers
    joined = {agent.host for agent in job.agents.values() if agent.is_connected or agent.is_draining}
    return {host: offer for host, offer in known.items() if host not in joined and not job.is_banned(host)}


def worker_capacity(job: Job) -> int:
    """Return for how many workers there is capacity, including hosts whose agents have not joined yet."""
    if job.offers is None:
        return usable_slots(job) + sum(offer.slots for offer in _reserved(job).values())
    left = {agent.host for agent in job.agents.values() if agent.is_draining}
    offered = sum(offer.slots for host, offer in job.offers.items() if host not in left and not job.is_banned(host))
    given_up = [
        slot
        for slot, use in job.slots.items()
        if use.is_given_up and job.host(slot) not in left and not job.is_banned(job.host(slot))
    ]
    return offered - len(given_up)


def expected_slots(job: Job) -> tuple[list[tuple[str, int]], dict[Slot, int]]:
    """Return the places of the members that there will most likely be, by rank, as placements() takes them, and the
    ranks of the slots of those that are not members yet. At the start the ranks follow the order of the slots; later
    newcomers come after the members that stay."""
    if job.generation is None:
        opened = {slot for slot, use in job.slots.items() if use.is_open}
        candidates = [each for each in slot_candidates(job) if each.slot is None or each.slot in opened]
        expected = candidates[: max(job.target, 1)]
        ranks = {each.slot: rank for rank, each in enumerate(expected) if each.slot is not None}
        numbers = [each.index if each.slot is None else number_on_host(job, each.slot) for each in expected]
        return list(zip([each.host for each in expected], numbers, strict=True)), ranks
    staying = job.staying()
    coming = sorted(job.newcomers(), key=job.slot_order)
    slots = [(job.host_of(each), number_on_host(job, each.slot)) for each in (*staying, *coming)]
    return slots, {worker.slot: rank for rank, worker in enumerate(coming, len(staying))}


# Placements and neighbours of the members of a generation -------------------------------------------------------------


def number_on_host(job: Job, slot: Slot) -> int:
    """Return the number of a slot among all slots of its host, from 0: its index, where the host has one agent."""
    mine = job.agents[slot.agent]
    return slot.index + sum(
        agent.slots
        for agent in job.agents.values()
        if agent.host == mine.host and agent.is_connected and (agent.order, agent.name) < (mine.order, mine.name)
    )


def placements(slots: Sequence[tuple[str, int]]) -> list[Placement]:
    """Return the placements of the members whose hosts, and numbers of slots on their hosts, are given by rank.

    As in Horovod, local_rank is a number from 0 to local_size - 1. It is the number of the slot: so the local ranks of
    the other members stay as they are when a worker is replaced. Only while a host has empty slots, a member whose slot
    has a number of local_size or more takes that of an empty one. cross_rank counts the hosts that have a member with
    the same local_rank, in the order of those members' ranks.
    """
    by_host: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (host, _) in enumerate(slots):
        by_host[host].append(rank)
    local_ranks: dict[int, int] = {}
    for ranks in by_host.values():
        free = set(range(len(ranks)))
        without: list[int] = []
        for rank in sorted(ranks, key=lambda each: slots[each][1]):
            if (number := slots[rank][1]) in free:
                free.remove(number)
                local_ranks[rank] = number
            else:
                without.append(rank)
        local_ranks.update(zip(without, sorted(free), strict=True))
    peers_across: Counter[int] = Counter()
    cross_ranks: list[int] = []
    for rank in range(len(slots)):
        cross_ranks.append(peers_across[local_ranks[rank]])
        peers_across[local_ranks[rank]] += 1
    return [
        Placement(
            rank=rank,
            size=len(slots),
            local_rank=local_ranks[rank],
            local_size=len(by_host[host]),
            cross_rank=cross_ranks[rank],
            cross_size=peers_across[local_ranks[rank]],
        )
        for rank, (host, _) in enumerate(slots)
    ]


def ring_neighbours(members: Sequence[tuple[str, DataAddress]]) -> list[tuple[Peer, Peer]]:
    """Return the previous and the next neighbour of each rank. A single member is its own neighbour."""
    peers = [Peer(worker, rank, address) for rank, (worker, address) in enumerate(members)]
    size = len(peers)
    return [(peers[rank - 1], peers[(rank + 1) % size]) for rank in range(size)]
