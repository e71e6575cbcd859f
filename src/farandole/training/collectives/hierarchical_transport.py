"""Run all collectives among several hosts, with several ranks on some of them.

A tensor is reduced over the ranks of a host in their shared memory (shared_memory_transport.py), then over the hosts
by rings, then the other ranks copy it from shared memory. Each ring reduces a part of the tensor; the first
ring is that of the leaders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from farandole.training.collectives.connection_pair import (
    Broken,
    Interruption,
    PeerCalled,
    byte_view,
    combiner,
    flat_view,
)
from farandole.training.collectives.control_blocks import (
    DATA_BYTES,
    ControlBlock,
    ControlBlocks,
    MessageSlot,
    share_control_blocks,
)
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import Header, TransportOperation
from farandole.training.collectives.shared_memory_group import (
    MAX_PAYLOAD_BYTES,
    SharedMemoryGroup,
    add_data,
    combine_data,
    trailers_of,
)
from farandole.training.collectives.transport import Reduction, refuse_source

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division

# All hosts cut at the same places, whatever each has to copy: one operation of a ring covers about one piece.
_PIECE_BYTES = 4 << 20


class HierarchicalTransport:
    """A Transport (transport.py). close() closes the rings.

    `control_blocks` are those of the ranks of this host; new ones for each generation.
    """

    # The group must not refer to the transport: memory that only a cycle holds is not released with the generation.
    def __init__(self, rings: Rings, layout: HostLayout, control_blocks: Sequence[ControlBlock]) -> None:
        self.rank, self.size = rings.whole.rank, rings.whole.size
        self._rings, self._layout = rings, layout
        self._group = SharedMemoryGroup(
            layout.place, layout.mates, control_blocks, rings, _PIECE_BYTES, is_always_in_pieces=True
        )

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, combine = flat_view(tensor), combiner(op)
        trailers_bytes = len(trailer) * self.size
        if flat.numel() == 0 or len(trailer) > MAX_PAYLOAD_BYTES or trailers_bytes > DATA_BYTES:
            with self._rings.together():
                return self._rings.whole.all_reduce(flat, trailer, op)
        header = self._rings.next_header(TransportOperation.ALL_REDUCE, flat, op, len(trailer))

        def across(ring: RingTransport, parts: list[torch.Tensor], trailers: bytes) -> list[bytes]:
            return ring.reduce_as(header, parts[0], trailers, combine)

        with self._rings.running(header):
            if flat.nbytes + trailers_bytes <= DATA_BYTES:
                message_slots = self._group.post(header, trailer, flat)
                if self._layout.place == 0:
                    combine_data(flat, message_slots, combine, combine)
                return self._finish_on_leader(header, message_slots, flat, [flat], across)

            def finish(part: torch.Tensor, number: int, message_slots: list[MessageSlot]) -> None:
                self._finish_part(header, message_slots, [part], across, has_trailers=number == 0)

            message_slots = self._group.reduce(header, trailer, flat, combine, combine, self._layout.rings, finish)
            return self._trailers(header, message_slots[0].data)

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        from farandole.training.collectives.shard_tree import merge  # loaded only in strict mode

        flats, shards = [flat_view(row) for row in rows], division.shards
        nbytes, trailers_bytes = flats[0].nbytes, len(trailer) * self.size
        if not nbytes or trailers_bytes > DATA_BYTES:
            with self._rings.together():
                return self._rings.whole.all_reduce_shards(flats, division, trailer, factor)
        header = self._rings.next_header(TransportOperation.ADD_SHARDS, flats[0], shards, len(trailer))
        by_host = [[division.forests[rank] for rank in host] for host in self._layout.hosts]
        forests, forests_of_hosts = by_host[self._layout.host], [merge(tuple(each), shards).forest for each in by_host]

        def across(ring: RingTransport, sums: list[torch.Tensor], trailers: bytes) -> list[bytes]:
            return ring.add_shards_as(header, sums, forests_of_hosts, trailers, factor)

        with self._rings.running(header):
            if nbytes * max(map(len, division.forests)) + trailers_bytes <= DATA_BYTES:
                message_slots = self._group.post_rows(header, trailer, flats, forests)
                sums = add_data(flats[0], message_slots, forests, shards) if self._layout.place == 0 else []
                return self._finish_on_leader(header, message_slots, flats[0], sums, across)

            def finish(sums: list[torch.Tensor], message_slots: list[MessageSlot]) -> None:
                self._finish_part(header, message_slots, sums, across)

            message_slots = self._group.add_shards(header, trailer, flats, forests, self._layout.rings, finish)
            return self._trailers(header, message_slots[0].data)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        refuse_source(source, self.size)
        flat = flat_view(tensor)
        if flat.numel() == 0:
            with self._rings.together():
                self._rings.whole.broadcast(flat, source)
            return
        header = self._rings.next_header(TransportOperation.BROADCAST, flat, source)
        host, place = self._layout.find(source)
        is_here, is_alone = host == self._layout.host, self._group.size == 1
        with self._rings.running(header):
            if is_here and not is_alone:
                self._group.broadcast(header, flat, place)
                self._rings.needs_local = False  # the others of this host may have gone on, and left
            if self._layout.place == 0:
                self._leaders.broadcast_as(header, flat, host)
            if not is_here and not is_alone:
                self._group.broadcast(header, flat, 0)

    def all_gather(self, payload: bytes) -> list[bytes]:
        with self._rings.together():
            return self._rings.whole.all_gather(payload)

    def barrier(self) -> None:
        with self._rings.together():
            self._rings.whole.barrier()

    def wait_for_peer(self, wake: int) -> bool | None:
        with self._rings.together():
            return self._rings.whole.wait_for_peer(wake)

    def abort(self, reason: str) -> None:
        self._rings.abort(reason)
        self._group.wake()

    def close(self) -> None:
        self._rings.close()
        self._group.close()

    # Across the hosts --------------------------------------------------------------------------------------

    @property
    def _leaders(self) -> RingTransport:
        assert self._rings.across is not None, "every host has a leader"
        return self._rings.across

    def _finish_on_leader(
        self,
        header: Header,
        message_slots: list[MessageSlot],
        flat: torch.Tensor,
        sums: list[torch.Tensor],
        across: Across,
    ) -> list[bytes]:
        """Complete a small tensor on the leaders, who have the sums of their hosts: the other ranks copy the result.
        The first of the sums is `flat`."""
        data = message_slots[0].data
        result, trailers = data[: flat.nbytes].view(flat.dtype), data[flat.nbytes :]
        if self._layout.place == 0:
            self._keep_trailers(header, trailers, self._across_leaders(header, message_slots, sums, across))
            result.copy_(flat)
        self._group.meet(header)
        if self._layout.place:
            flat.copy_(result)
        return self._trailers(header, trailers)

    def _finish_part(
        self,
        header: Header,
        message_slots: list[MessageSlot],
        sums: list[torch.Tensor],
        across: Across,
        has_trailers: bool = True,
    ) -> None:
        """Complete a part of a large tensor: the first ranks of each host have one each, of their host, and reduce it
        over all hosts.

        The trailers of all ranks travel with the leaders' first part, and wait in the leader's message slot for the
        others.
        """
        if self._layout.place == 0 and has_trailers:
            packed = self._across_leaders(header, message_slots, sums, across)
            self._keep_trailers(header, message_slots[0].data, packed)
        elif self._rings.across is not None:
            across(self._rings.across, sums, b"")

    def _across_leaders(
        self, header: Header, message_slots: list[MessageSlot], sums: list[torch.Tensor], across: Across
    ) -> list[bytes]:
        """Reduce the leaders' sums over the hosts. Return the trailers of each host, as they travel."""
        mine = pack_trailers(trailers_of(header, message_slots), self._layout.most_mates)
        return across(self._leaders, sums, mine)

    def _keep_trailers(self, header: Header, data: torch.Tensor, packed: list[bytes]) -> None:
        """Write the trailers of all ranks into `data`, where the other ranks read them."""
        trailers = bytearray().join(unpack_trailers(packed, self._layout.hosts, header.trailer_bytes))
        if trailers:
            data[: len(trailers)] = torch.frombuffer(trailers, dtype=torch.uint8)

    def _trailers(self, header: Header, data: torch.Tensor) -> list[bytes]:
        """Return the trailers of all ranks that _keep_trailers() has written."""
        length = header.trailer_bytes
        joined = bytes(byte_view(data[: length * self.size]))
        return [joined[rank * length :][:length] for rank in range(self.size)]


Across = Callable[[RingTransport, list[torch.Tensor], bytes], list[bytes]]
"""across(ring, this rank's sums of its host, trailers of its host): reduce the sums over the hosts, in place. Returns
the trailers of each host."""


# Construction from a ring of all ranks --------------------------------------------------------------------------------
#
# It is possible if the ranks of each host can read each other's memory.

ConnectRing = Callable[[Sequence[int], int], RingTransport]
"""connect(ranks, number): connect a ring of some of the ranks, at least two, this one among them; all call it at once.

`number`, from 0, is larger than that of each ring that was connected before.
"""

RINGS_PER_RANK = 2
"""The maximum number of rings that a rank connects."""


def share_memory_within_hosts(
    ring: RingTransport, layout: HostLayout, connect: ConnectRing, control_blocks: ControlBlocks | None = None
) -> HierarchicalTransport | str:
    """Return the transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    All ranks of the ring call it at once, before any other operation. Raises PeerLost and GenerationEnded, and the
    errors of `connect`. `control_blocks` are those of the ranks of this host, if they were shared before.
    """
    shared = control_blocks or share_control_blocks(ring, layout.mates)
    if isinstance(shared, str):
        return shared
    rings: list[RingTransport | None] = []
    with ExitStack() as cleanup:
        for number, ranks in enumerate((layout.mates, layout.across)):
            rings.append(connect(ranks, number) if len(ranks) > 1 else None)
            if (connected := rings[-1]) is not None:
                cleanup.callback(connected.close)
        cleanup.pop_all()
    local, across = rings
    return HierarchicalTransport(Rings(ring, local, across, layout.across), layout, shared)


# The rings of one rank, which end together ----------------------------------------------------------------------------

_LOOK_AROUND_S = 0.002  # as ranks that wait in shared memory do


class Rings:
    """The rings that this rank is in.

    Args:
        whole: Connects all ranks. It carries operations without a tensor, and reports ranks in another operation.
        local: Connects the ranks of this host, if there are others: when it breaks, one of them is gone. The whole ring
            cannot tell that in the middle of an operation: ranks of another host may have finished, and left.
        across: Connects one rank of each host, whose ranks are `across_names`; None if this rank is in no such ring.
    """

    def __init__(
        self,
        whole: RingTransport,
        local: RingTransport | None,
        across: RingTransport | None,
        across_names: Sequence[int],
    ) -> None:
        self.whole, self.across, self._local = whole, across, local
        self._all = [each for each in (whole, local, across) if each is not None]
        self.next_header = whole.next_header
        self._header: Header | None = None
        self.needs_local = True
        """False when the operation that runs needs no other rank of this host any more."""
        if across is not None:
            across.serve(across_names, self._look_around, _LOOK_AROUND_S)

    @contextmanager
    def running(self, header: Header) -> Iterator[None]:
        """Enclose an operation on a tensor."""
        with self.together(), self.whole.running(header):
            self._header, self.needs_local = header, True
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose any operation: an error that ends one ring ends all, so that waiting ranks learn of it."""
        try:
            yield
        except BaseException as error:
            for ring in self._all:
                ring.end(error)
            raise

    def interruption(self) -> Interruption | None:
        """Return why this rank should stop its operation: a rank of this host is gone, or one is in another operation.

        Raises CollectiveMismatch if one of them reports it.
        """
        broken = self._local.interruption() if self._local is not None and self.needs_local else None
        called = self.whole.interruption()
        return broken or (called if isinstance(called, PeerCalled) else None)

    def end_by(self, interruption: Interruption, header: Header) -> NoReturn:
        """Raise the error of the interruption."""
        ring = self._local if isinstance(interruption, Broken) and self._local is not None else self.whole
        ring.end_by(interruption, header)

    def abort(self, reason: str) -> None:
        """Abort all rings. Callable from any thread."""
        for ring in self._all:
            ring.abort(reason)

    def close(self) -> None:
        for ring in self._all:
            ring.close()

    def _look_around(self) -> None:
        """Check the ring of this host while this rank waits for other hosts."""
        interruption = self.interruption()
        if interruption is not None and self._header is not None:
            self.end_by(interruption, self._header)


# The ranks of each host -----------------------------------------------------------------------------------------------


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
