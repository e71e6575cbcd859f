"""Which ranks are on which host, and which of them talk across hosts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`hosts` holds the ranks of each host, in order; hosts come in the order of their first ranks.

    host, place  of this rank: which host, and which of its ranks; `place` 0 is the host's *leader*
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
        """How many rings lead across hosts: as many as the smallest host has ranks."""
        return min(map(len, self.hosts))

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks of the ring that this rank is in, one of each host; empty if it is in none."""
        return tuple(host[self.place] for host in self.hosts) if self.place < self.rings else ()

    @property
    def most_mates(self) -> int:
        """Of any host."""
        return max(map(len, self.hosts))

    def find(self, rank: int) -> tuple[int, int]:
        """Host and place of a rank."""
        return next((number, host.index(rank)) for number, host in enumerate(self.hosts) if rank in host)


def layout(hosts: Sequence[Hashable], rank: int) -> Layout:
    """Of a world in which `hosts` says where each rank is, seen from `rank`."""
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for other, host in enumerate(hosts):
        members[host].append(other)
    ranks = tuple(tuple(each) for each in members.values())
    return Layout(ranks, list(members).index(hosts[rank]), members[hosts[rank]].index(rank))


def pack_trailers(trailers: Sequence[bytes], most: int) -> bytes:
    """The trailers of one host, all of one length, as long as those of a host with `most` ranks."""
    return b"".join(trailers) + bytes((most - len(trailers)) * len(trailers[0]))


def unpack_trailers(packed: Sequence[bytes], hosts: Sequence[Sequence[int]], trailer_bytes: int) -> list[bytes]:
    """From what pack_trailers() made on each host: the trailers of all ranks, by rank."""
    trailers = [b""] * sum(map(len, hosts))
    for ranks, text in zip(hosts, packed, strict=True):
        for place, rank in enumerate(ranks):
            trailers[rank] = text[place * trailer_bytes : (place + 1) * trailer_bytes]
    return trailers
