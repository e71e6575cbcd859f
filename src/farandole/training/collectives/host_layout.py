"""Map ranks to hosts, and select the ranks that communicate across hosts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostLayout:
    """The ranks of each host, seen from this rank.

    Attributes:
        hosts: The ranks of each host, in order; hosts come in the order of their first ranks.
        host: The number of this rank's host.
        place: The number of this rank among those of its host; 0 is the host's *leader*.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    place: int

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def rings(self) -> int:
        """The number of rings across hosts: that of the ranks of the smallest host."""
        return min(map(len, self.hosts))

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks of this rank's ring, one of each host; empty if it is in none."""
        return tuple(host[self.place] for host in self.hosts) if self.place < self.rings else ()

    @property
    def most_mates(self) -> int:
        """The number of ranks of the largest host."""
        return max(map(len, self.hosts))

    def find(self, rank: int) -> tuple[int, int]:
        """Return the host and place of a rank."""
        return next((number, host.index(rank)) for number, host in enumerate(self.hosts) if rank in host)


def layout(hosts: Sequence[Hashable], rank: int) -> HostLayout:
    """Return the layout of a world in which `hosts` is the host of each rank, seen from `rank`."""
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for other, host in enumerate(hosts):
        members[host].append(other)
    ranks = tuple(tuple(each) for each in members.values())
    return HostLayout(ranks, list(members).index(hosts[rank]), members[hosts[rank]].index(rank))


def pack_trailers(trailers: Sequence[bytes], most: int) -> bytes:
    """Join the trailers of one host, all of one length, padded to the length of a host with `most` ranks."""
    return b"".join(trailers) + bytes((most - len(trailers)) * len(trailers[0]))


def unpack_trailers(packed: Sequence[bytes], hosts: Sequence[Sequence[int]], trailer_bytes: int) -> list[bytes]:
    """Return the trailers of all ranks, by rank, from the result of pack_trailers() of each host."""
    trailers = [b""] * sum(map(len, hosts))
    for ranks, text in zip(hosts, packed, strict=True):
        for place, rank in enumerate(ranks):
            trailers[rank] = text[place * trailer_bytes : (place + 1) * trailer_bytes]
    return trailers
