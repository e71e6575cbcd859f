"""Ranks, places and neighbours of the members. Pure; used when workers are started and generations start."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from farandole.membership import Address, Peer, Placement


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


def ring(members: Sequence[tuple[str, Address]]) -> list[tuple[Peer, Peer]]:
    """Return the previous and the next neighbour of each rank. A single member is its own neighbour."""
    peers = [Peer(worker, rank, address) for rank, (worker, address) in enumerate(members)]
    size = len(peers)
    return [(peers[rank - 1], peers[(rank + 1) % size]) for rank in range(size)]
