"""The construction of this worker's world from a START: one transport for the steps, one for each extension, and
what these connect besides. Used by worker_job.py and fixed_job.py."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch

from farandole.base.env import read_job_env, read_reconfigure
from farandole.base.membership import DataAddress, Peer, Placement
from farandole.base.wire.link_messages import Start
from farandole.errors import ConfigError
from farandole.training.collectives import torch_versions
from farandole.training.collectives.control_blocks import ControlBlockRefs, ControlBlocks, OwnControlBlocks
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.extension import Connect, Extender, Extension
from farandole.training.collectives.hierarchical_transport import RINGS_PER_RANK
from farandole.training.collectives.kept_group import KeptGroup
from farandole.training.collectives.point_to_point import Endpoint, PointToPoint
from farandole.training.collectives.ring import OnBroken, RingTransport
from farandole.training.collectives.ring_builder import RingBuilder
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.transport_choice import (
    Devices,
    Way,
    choice_within_tls,
    choose,
    decide,
    for_devices,
    own_devices,
)
from farandole.training.collectives.world import World, log_remark
from farandole.training.worker.worker_recovery import Abortable, AbortRegistry

logger = logging.getLogger("farandole")

# Channels of one generation. A session is the time from init() to shutdown(): its rings have channels of their own. A
# transport has one for the ring of all its ranks, and others for rings of some of them.
_CHANNELS_PER_SESSION = 1 << 20
_CHANNELS_PER_TRANSPORT = 1 + RINGS_PER_RANK
_STEPS = 0  # the extensions follow, and then what these connect

SUBSET_TIMEOUT_S = 5.0
"""Seconds for some of the ranks to connect, once all have agreed on it."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """The data that a worker sends to all others when they have connected."""

    worker: str
    address: DataAddress
    host: str  # Placement.cross_rank does not tell hosts apart: it counts only those that have this local rank
    carries_over: bool  # an extender does
    p2p: DataAddress
    devices: Devices = Devices()
    control_blocks: ControlBlockRefs = ControlBlockRefs()


@dataclass(frozen=True)
class _Settings:
    """What the environment says of the worlds; `reconfigures` is None where it does not mention that."""

    transport: str
    reconfigures: bool | None


class WorldBuilder:
    """Builds worlds one after the other, always by the same listener.

    worker     this worker's id
    host       the same for all workers of this host, and only for them
    extenders  by name; those of all workers are the same, in the same order
    on_broken  called with (worker of the peer, direction, detail) when a connection cannot be made, or fails
    check      called at least once a second during a wait; may raise
    aborts     gets each builder and transport before it can block; None where no coordinator ends generations
    on_way     called on rank 0 with a generation's number and how tensors move in it, when that differs from the one
               before
    slot       the worker's slot on its host
    on_remark  as in World
    """

    def __init__(
        self,
        listener: DataListener,
        worker: str,
        host: str,
        extenders: Mapping[str, Extender],
        on_broken: Callable[[int, str, str, str], None] | None = None,
        check: Callable[[], None] | None = None,
        aborts: AbortRegistry | None = None,
        on_way: Callable[[int, str], None] = lambda _number, _way: None,
        slot: int = 0,
        on_remark: Callable[[str, str], None] = log_remark,
    ) -> None:
        self._listener, self._worker, self._host, self._extenders = listener, worker, host, extenders
        self._transports = 1 + len(extenders)  # of every world: for the steps, and for each extension
        self._on_way, self._slot, self._on_remark = on_way, slot, on_remark
        self._last_way = ""
        self._on_broken, self._check, self._aborts = on_broken, check, aborts
        self._kept = KeptGroup()

    def forget_settings(self) -> None:
        """Read the environment anew for the next world: scripts change it between shutdown() and init()."""
        vars(self).pop("_settings", None)

    @cached_property
    def _settings(self) -> _Settings:
        return _Settings(read_job_env().transport, read_reconfigure())

    def build(self, start: Start, session: int, timeout_s: float) -> tuple[World, bool]:
        """Build the world of `start`; all its members build it with the same `session`, each within `timeout_s` of the
        first. Return it, and whether carry_over() of the extenders is due once it is entered: one on any member carries
        over. Raises PeerLost, GenerationEnded, and the errors of `check`."""
        channel = session * _CHANNELS_PER_SESSION
        ring = self._ring(start, channel + _STEPS, timeout_s)
        for_p2p = DataListener(*self._listener.address.hosts, tls=self._listener.tls)
        try:
            may_share_memory = start.placement.size > 1 and self._settings.transport != "tcp"
            own = OwnControlBlocks(start.placement.rank, self._transports if may_share_memory else 0)
            directory = _directory(ring, self._member(for_p2p.address, own.refs))
            p2p = self._p2p(for_p2p, start, directory)
            control_blocks = _open_pages(ring, own, directory, self._settings.transport, self._transports)
            return self._build_upon(ring, start, directory, channel, timeout_s, p2p, control_blocks)
        except BaseException:
            for_p2p.close()
            raise

    def _build_upon(
        self,
        ring: Transport,
        start: Start,
        directory: list[Member],
        channel: int,
        timeout_s: float,
        p2p: PointToPoint,
        control_blocks: Sequence[ControlBlocks | str | None],
    ) -> tuple[World, bool]:
        host, way = self._upon(ring, start, directory, channel + _STEPS, timeout_s, control_blocks[_STEPS])
        hosts, choice = [each.host for each in directory], self._settings.transport
        steps, description = for_devices(
            host,
            ring,
            way,
            hosts,
            [each.devices for each in directory],
            choice if self._listener.tls is None else choice_within_tls(choice, hosts),
            self._kept_group(),
        )
        if steps is not host:
            self._register(start, steps)
        extensions: dict[str, Extension] = {}
        for place, (name, extender) in enumerate(self._extenders.items(), start=1):
            its_channel = channel + place * _CHANNELS_PER_TRANSPORT
            its_ring = self._ring(start, its_channel, timeout_s)
            its_own, _ = self._upon(its_ring, start, directory, its_channel, timeout_s, control_blocks[place])
            connect = self._connector(start, directory, channel, place)
            extensions[name] = extender.extend(its_own, start.placement, connect)
        is_homogeneous = len(set(Counter(member.host for member in directory).values())) == 1
        entered = World(start.id, start.placement, steps, extensions, is_homogeneous, p2p, self._on_remark)
        self._report_way(description, start)
        return entered, any(member.carries_over for member in directory)

    def _connector(self, start: Start, directory: list[Member], channel: int, place: int) -> Connect:
        """Return what connects some of the ranks for the extension at this place."""

        def connect(ranks: tuple[int, ...], number: int) -> Transport:
            members = [directory[rank] for rank in ranks]
            subset = _among(start, members, ranks.index(start.placement.rank), range(len(ranks)))
            before = self._transports + number * len(self._extenders) + place - 1
            its_channel = channel + before * _CHANNELS_PER_TRANSPORT
            ring = self._ring(subset, its_channel, SUBSET_TIMEOUT_S)
            return self._upon(ring, subset, members, its_channel, SUBSET_TIMEOUT_S)[0]

        return connect

    def _member(self, p2p: DataAddress, control_blocks: ControlBlockRefs) -> Member:
        devices = own_devices(self._settings.transport, self._slot)
        carries_over = any(each.carries_over for each in self._extenders.values())
        return Member(self._worker, self._listener.address, self._host, carries_over, p2p, devices, control_blocks)

    def _p2p(self, listener: DataListener, start: Start, directory: list[Member]) -> PointToPoint:
        endpoints = [
            # A worker without control blocks has no shared memory, or was told to use none.
            Endpoint(member.worker, member.p2p, member.host if member.control_blocks.refs else None)
            for member in directory
        ]
        number, rank = start.id.number, start.placement.rank
        p2p = PointToPoint(listener, start.id, start.data_key, rank, endpoints, self._reporter(number), self._check)
        self._register(start, p2p)
        return p2p

    def _ring(self, start: Start, channel: int, timeout_s: float) -> Transport:
        """Return the ring of all members of `start`."""
        on_broken = self._reporter(start.id.number)
        builder = RingBuilder(self._listener, start, self._worker, timeout_s, on_broken, self._check, channel)
        self._register(start, builder, is_builder=True)
        ring = builder.build()
        self._register(start, ring, replaces=builder)
        return ring

    def _upon(
        self,
        ring: Transport,
        start: Start,
        members: list[Member],
        channel: int,
        timeout_s: float,
        control_blocks: ControlBlocks | str | None = None,
    ) -> tuple[Transport, Way]:
        """Return the fastest transport that can be built upon the ring of these members."""

        def connect(ranks: Sequence[int], number: int) -> RingTransport:
            subset = _among(start, [members[rank] for rank in ranks], ranks.index(start.placement.rank), ranks)
            connected = self._ring(subset, channel + 1 + number, timeout_s)
            assert isinstance(connected, RingTransport), "there are at least two ranks"
            return connected

        hosts = [member.host for member in members]
        transport, way = choose(ring, hosts, self._settings.transport, connect, control_blocks)
        if transport is not ring:
            self._register(start, transport)
        return transport, way

    def _kept_group(self) -> KeptGroup | None:
        """Return the process group of the devices that lives through the generations; None: FARANDOLE_RECONFIGURE does
        not require it. Raises ConfigError if this torch does not have such groups."""
        settings = self._settings
        if not settings.reconfigures or settings.transport not in ("auto", "nccl"):
            return None
        if torch_versions.can_reconfigure():
            return self._kept
        if settings.transport == "nccl":
            raise ConfigError(
                f"FARANDOLE_RECONFIGURE=1 needs torch 2.14 or newer, this is {torch.__version__}: unset it, and each "
                f"generation has a process group of its own"
            )
        return None

    def _register(
        self, start: Start, abortable: Abortable, is_builder: bool = False, replaces: Abortable | None = None
    ) -> None:
        """Let aborts reach an object from now on. Raises GenerationEnded if the abort came first."""
        if self._aborts is not None:
            self._aborts.register(start.id.number, abortable, is_builder=is_builder, replaces=replaces)

    def _report_way(self, way: str, start: Start) -> None:
        """Report how tensors move, once, and when that has changed."""
        if way != self._last_way and start.placement.rank == 0:
            logger.info("transport of generation %s: %s", start.id, way)
            self._on_way(start.id.number, way)
        self._last_way = way

    def _reporter(self, number: int) -> OnBroken | None:
        on_broken = self._on_broken
        if on_broken is None:
            return None
        return lambda peer, direction, detail: on_broken(number, peer, direction, detail)


def _directory(ring: Transport, mine: Member) -> list[Member]:
    """Return every member's data, by rank. START names the neighbours only: the coordinator cannot send all members to
    each worker."""
    return [msgspec.msgpack.decode(each, type=Member) for each in ring.all_gather(msgspec.msgpack.encode(mine))]


def _open_pages(
    ring: Transport, own: OwnControlBlocks, directory: list[Member], asked_for: str, transports: int
) -> Sequence[ControlBlocks | str | None]:
    """Return for each transport the control blocks of this host's ranks, or why there are none; None where they were
    not requested. All at once: every exchange between the ranks costs the slowest one's time to wake up."""
    if not isinstance(ring, RingTransport) or not (own.refs.refs or own.refs.problem):
        return [None] * transports
    hosts = [member.host for member in directory]
    if decide(hosts, asked_for) not in (Way.SHARED_MEMORY, Way.HIERARCHICAL):
        return [None] * transports
    mates = [rank for rank, host in enumerate(hosts) if host == hosts[ring.rank]]
    opened = own.open_those_of(ring, mates, [member.control_blocks for member in directory])
    return [opened] * transports if isinstance(opened, str) else opened


def _among(start: Start, members: list[Member], place: int, names: Sequence[int]) -> Start:
    """Return the same START for a ring of some of the members; `place`: this worker's among them. In errors they have
    these names."""
    size = len(members)
    hosts = list(dict.fromkeys(member.host for member in members))
    by_host = [hosts.index(member.host) for member in members]
    mine = by_host[place]
    peers = [Peer(member.worker, name, member.address) for member, name in zip(members, names, strict=True)]
    return msgspec.structs.replace(
        start,
        placement=Placement(place, size, by_host[:place].count(mine), by_host.count(mine), mine, len(hosts)),
        previous=peers[place - 1],
        next=peers[(place + 1) % size],
    )
