"""Placements and neighbours of the members of a generation. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from farandole.base.membership import DataAddress, Peer, Placement
from farandole.job.coordinator.job import Job, Slot


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
