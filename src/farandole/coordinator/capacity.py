"""The capacity of the job: the slots of the hosts that may be used; and the placements of workers. Pure; slots.py fills
the slots.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from farandole.coordinator.job import Job, Slot, Worker
from farandole.membership import Address, Peer, Placement


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

    Until the first generation the candidates include the slots of offered hosts whose agents have not joined yet: their
    place in the order is reserved.
    """
    candidates = [
        SlotCandidate(agent.order, index, agent.host, Slot(agent.name, index))
        for agent in job.agents.values()
        if agent.is_connected and not agent.is_draining and not job.is_banned(agent.host)
        for index in range(agent.slots)
    ]
    if job.generation is None:
        joined = {agent.host for agent in job.agents.values() if agent.is_connected or agent.is_draining}
        candidates += [
            SlotCandidate(offer.order, index, host)
            for host, offer in (job.offers or {}).items()
            if host not in joined and not job.is_banned(host)
            for index in range(offer.slots)
        ]
    return sorted(
        (each for each in candidates if not _is_given_up(job, each)), key=lambda each: (each.order, each.index)
    )


def worker_capacity(job: Job) -> int:
    """Return for how many workers there is capacity, including hosts whose agents have not joined yet."""
    if job.offers is None:
        return len(slot_candidates(job))
    left = {agent.host for agent in job.agents.values() if agent.is_draining}
    offered = sum(offer.slots for host, offer in job.offers.items() if host not in left and not job.is_banned(host))
    given_up = [
        slot
        for slot, use in job.slots.items()
        if use.is_given_up and job.host(slot) not in left and not job.is_banned(job.host(slot))
    ]
    return offered - len(given_up)


def expected_placement(job: Job, worker: Worker) -> Placement:
    """Return the placement that a new worker will most likely get. At the start it follows the order of the slots;
    later the newcomer comes after the members that stay."""
    if job.generation is None:
        opened = {slot for slot, use in job.slots.items() if use.is_open}
        candidates = [each for each in slot_candidates(job) if each.slot is None or each.slot in opened][
            : max(job.target, 1)
        ]
        place = next((place for place, each in enumerate(candidates) if each.slot == worker.slot), len(candidates))
        hosts = [each.host for each in candidates]
        if place == len(candidates):
            hosts.append(job.host_of(worker))
        expected = placements(hosts)[place]
        return msgspec.structs.replace(expected, size=max(len(hosts), job.target))
    staying = [member for member in job.survivors() if not member.is_leaving]
    coming = sorted(job.newcomers(), key=job.slot_order)
    return placements([job.host_of(each) for each in (*staying, *coming)])[len(staying) + coming.index(worker)]


def _is_given_up(job: Job, candidate: SlotCandidate) -> bool:
    return candidate.slot is not None and candidate.slot in job.slots and job.slots[candidate.slot].is_given_up


# Ranks, placements and neighbours of the members of a generation ------------------------------------------------------


def by_rank(survivors: Sequence[str], newcomers: Sequence[str]) -> tuple[str, ...]:
    """Return the members of the next generation by rank: survivors keep their order, newcomers follow them.

    So a survivor's rank never grows, and the source rank is never moved behind a newcomer.
    """
    return (*survivors, *newcomers)


def placements(hosts: Sequence[str]) -> list[Placement]:
    """Return the placements of the members whose hosts are given by rank, numbered as in Horovod.

    local_rank counts the members of one host in rank order; cross_rank counts the hosts that have a member with the
    same local_rank, in the order of those members' ranks.
    """
    seen: Counter[str] = Counter()
    peers_across: defaultdict[int, int] = defaultdict(int)
    places: list[tuple[int, int]] = []
    for host in hosts:
        local_rank = seen[host]
        places.append((local_rank, peers_across[local_rank]))
        seen[host] += 1
        peers_across[local_rank] += 1
    return [
        Placement(
            rank=rank,
            size=len(hosts),
            local_rank=local_rank,
            local_size=seen[hosts[rank]],
            cross_rank=cross_rank,
            cross_size=peers_across[local_rank],
        )
        for rank, (local_rank, cross_rank) in enumerate(places)
    ]


def ring_neighbours(members: Sequence[tuple[str, Address]]) -> list[tuple[Peer, Peer]]:
    """Return the previous and the next neighbour of each rank. A single member is its own neighbour."""
    peers = [Peer(worker, rank, address) for rank, (worker, address) in enumerate(members)]
    size = len(peers)
    return [(peers[rank - 1], peers[(rank + 1) % size]) for rank in range(size)]
