"""From a START to this worker's world: one ring for the steps, one for the named collectives, and one for each
process set. Used by job.py and fixed_job.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from farandole.collectives.listener import DataListener
from farandole.collectives.named import process_sets
from farandole.collectives.named.engine import NamedCollectives
from farandole.collectives.named.settings import NamedSettings
from farandole.collectives.ring import OnBroken
from farandole.collectives.ring_builder import RingBuilder
from farandole.collectives.transport import Transport
from farandole.collectives.transport_choice import choose
from farandole.collectives.world import World
from farandole.env import read_transport
from farandole.membership import Address, Peer, Placement
from farandole.messages import Start

# Channels of one generation. A session is the time from init() to shutdown(): its rings have channels of their own.
_CHANNELS_PER_SESSION = 1 << 16
_STEPS, _NAMED, _FIRST_PROCESS_SET = 0, 1, 2

SUBSET_TIMEOUT_S = 5.0
"""For the members of a process set to connect, once all have agreed on it."""


class Abortable(Protocol):
    """A builder or a transport."""

    def abort(self, reason: str) -> None: ...


class Member(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells all others when they have connected."""

    worker: str
    address: Address
    host: int  # Placement.cross_rank
    has_process_sets: bool


@dataclass(frozen=True)
class Built:
    """A new world, to be entered; then, if `has_process_sets` (somebody has), process_sets.recreate() is due."""

    world: World
    has_process_sets: bool


class WorldBuilder:
    """Builds worlds one after the other, always by the same listener.

    worker     this worker's id
    settings   asked for each world, since scripts change them between shutdown() and init()
    on_broken  called with (worker of the peer, direction, detail) when a connection cannot be made, or fails
    check      called at least once a second while something waits; may raise
    watch      called with a generation's number and each builder and transport of it, before they can block: an
               abort must reach them. May raise when the abort came first
    """

    def __init__(
        self,
        listener: DataListener,
        worker: str,
        settings: Callable[[], NamedSettings],
        on_broken: Callable[[int, str, str, str], None] | None = None,
        check: Callable[[], None] | None = None,
        watch: Callable[[int, Abortable], None] = lambda _number, _abortable: None,
    ) -> None:
        self._listener, self._worker, self._settings = listener, worker, settings
        self._on_broken, self._check, self._watch = on_broken, check, watch

    def build(self, start: Start, session: int, timeout_s: float) -> Built:
        """The world of `start`; all its members build it with the same `session`, each within `timeout_s` of the
        first. Raises PeerLost, GenerationEnded, and what `check` and `watch` raise."""
        channel = session * _CHANNELS_PER_SESSION
        steps = self._transport(start, channel + _STEPS, timeout_s)
        ring = self._transport(start, channel + _NAMED, timeout_s)
        directory = _directory(ring, self._member(start))

        def connect(ranks: tuple[int, ...], process_set: int) -> Transport:
            subset = _among(start, [directory[rank] for rank in ranks], ranks.index(start.placement.rank))
            return self._transport(subset, channel + _FIRST_PROCESS_SET + process_set, SUBSET_TIMEOUT_S)

        named = NamedCollectives(ring, placement=start.placement, connect=connect, settings=self._settings())
        is_homogeneous = len(set(Counter(member.host for member in directory).values())) == 1
        entered = World(start.id, start.placement, steps, named, is_homogeneous)
        return Built(entered, any(member.has_process_sets for member in directory))

    def _member(self, start: Start) -> Member:
        return Member(self._worker, self._listener.address, start.placement.cross_rank, process_sets.has_added())

    def _transport(self, start: Start, channel: int, timeout_s: float) -> Transport:
        """A ring, and what can be built upon it."""
        number = start.id.number
        builder = RingBuilder(
            self._listener, start, self._worker, timeout_s, self._reporter(number), self._check, channel
        )
        self._watch(number, builder)
        ring = builder.build()
        self._watch(number, ring)
        transport = choose(ring, start.placement, read_transport())
        if transport is not ring:
            self._watch(number, transport)
        return transport

    def _reporter(self, number: int) -> OnBroken | None:
        on_broken = self._on_broken
        if on_broken is None:
            return None
        return lambda peer, direction, detail: on_broken(number, peer, direction, detail)


def _directory(ring: Transport, mine: Member) -> list[Member]:
    """Every member's words, by rank. START names the neighbours only: all members would be too much for the
    coordinator to tell everybody."""
    return [msgspec.msgpack.decode(said, type=Member) for said in ring.all_gather(msgspec.msgpack.encode(mine))]


def _among(start: Start, members: list[Member], place: int) -> Start:
    """The same START for a ring of some of the members only; `place`: this worker's among them."""
    size, hosts = len(members), [member.host for member in members]
    mine = hosts[place]
    peers = [Peer(member.worker, index, member.address) for index, member in enumerate(members)]
    return msgspec.structs.replace(
        start,
        placement=Placement(
            place, size, hosts[:place].count(mine), hosts.count(mine), sorted(set(hosts)).index(mine), len(set(hosts))
        ),
        previous=peers[place - 1],
        next=peers[(place + 1) % size],
    )
