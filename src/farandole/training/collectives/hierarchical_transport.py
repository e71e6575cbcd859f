"""Run all collectives among several hosts, with several ranks on some of them.

A tensor is reduced over the ranks of a host in their shared memory (shared_memory_transport.py), then over the hosts
by rings, then the other ranks copy it from shared memory. Each ring reduces a part of the tensor; the first
ring is that of the leaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch

from farandole.training.collectives.connection_pair import (
    Broken,
    Interruption,
    PeerCalled,
    byte_view,
    combiner,
    dtype_code,
    flat_view,
)
from farandole.training.collectives.control_blocks import (
    DATA_BYTES,
    ControlBlock,
    ControlBlocks,
    MessageSlot,
    share_control_blocks,
)
from farandole.training.collectives.host_layout import HostLayout, pack_trailers, unpack_trailers
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import HEADER_BYTES, Header, TransportOperation
from farandole.training.collectives.ring_schedules import Combine
from farandole.training.collectives.shared_memory_group import (
    MAX_PAYLOAD_BYTES,
    SharedMemoryGroup,
    add_data,
    combine_data,
)
from farandole.training.collectives.transport import Reduction

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division, Forest

# All hosts cut at the same places, whatever each has to copy: one operation of a ring covers about one piece.
_PIECE_BYTES = 4 << 20


class HierarchicalTransport:
    """A Transport (transport.py). close() closes the rings.

    `control_blocks` are those of the ranks of this host; new ones for each generation.
    """

    # The group must not refer to the transport: memory that only a cycle holds is not released with the generation.
    def __init__(self, rings: Rings, layout: HostLayout, control_blocks: Sequence[ControlBlock]) -> None:
        self._rings, self._layout = rings, layout
        self._group = SharedMemoryGroup(
            layout.place,
            layout.mates,
            control_blocks,
            rings.interruption,
            rings.end_by,
            _PIECE_BYTES,
            is_always_in_pieces=True,
        )

    @property
    def rank(self) -> int:
        return self._rings.whole.rank

    @property
    def size(self) -> int:
        return self._rings.whole.size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, combine = flat_view(tensor), combiner(op)
        trailers_bytes = len(trailer) * self.size
        if flat.numel() == 0 or len(trailer) > MAX_PAYLOAD_BYTES or trailers_bytes > DATA_BYTES:
            with self._rings.together():
                return self._rings.whole.all_reduce(flat, trailer, op)
        nbytes = flat.numel() * flat.element_size()
        header = Header(
            TransportOperation.ALL_REDUCE,
            self._rings.whole.next_sequence,
            dtype_code(flat.dtype),
            op,
            nbytes,
            len(trailer),
        )
        with self._rings.running(header):
            if nbytes + trailers_bytes <= DATA_BYTES:
                return self._reduce_small(header, trailer, flat, combine)
            return self._reduce(header, trailer, flat, combine)

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        flats = [flat_view(row) for row in rows]
        nbytes, trailers_bytes = flats[0].numel() * flats[0].element_size(), len(trailer) * self.size
        if not nbytes or trailers_bytes > DATA_BYTES:
            with self._rings.together():
                return self._rings.whole.all_reduce_shards(flats, division, trailer, factor)
        operation, code = TransportOperation.ADD_SHARDS, dtype_code(flats[0].dtype)
        header = Header(operation, self._rings.whole.next_sequence, code, division.shards, nbytes, len(trailer))
        is_small = nbytes * max(map(len, division.forests)) + trailers_bytes <= DATA_BYTES
        with self._rings.running(header):
            return (self._add_small if is_small else self._add)(header, trailer, flats, division, factor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self.size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self.size - 1}, got {source}")
        flat = flat_view(tensor)
        if flat.numel() == 0:
            with self._rings.together():
                self._rings.whole.broadcast(flat, source)
            return
        nbytes = flat.numel() * flat.element_size()
        header = Header(
            TransportOperation.BROADCAST, self._rings.whole.next_sequence, dtype_code(flat.dtype), source, nbytes
        )
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
        """Close the transport; no collective may run. Later calls raise GenerationEnded."""
        self._rings.close()
        self._group.close()

    # Tensors -----------------------------------------------------------------------------------------------

    @property
    def _leaders(self) -> RingTransport:
        assert self._rings.across is not None, "every host has a leader"
        return self._rings.across

    def _reduce_small(self, header: Header, trailer: bytes, flat: torch.Tensor, combine: Combine) -> list[bytes]:
        """Reduce on the leader: all tensors of its host, then over the hosts; the other ranks copy its result."""
        message_slots = self._group.post(header, trailer, flat)
        data = message_slots[0].data
        nbytes = flat.numel() * flat.element_size()
        if self._layout.place == 0:
            combine_data(flat, message_slots, combine, combine)
            data[nbytes:][: len(trailer) * self.size] = self._across_leaders(header, flat, message_slots, combine)
            data[:nbytes].view(flat.dtype).copy_(flat)
        self._group.meet(header)
        if self._layout.place:
            flat.copy_(data[:nbytes].view(flat.dtype))
        return self._trailers(data[nbytes:], len(trailer))

    def _reduce(self, header: Header, trailer: bytes, flat: torch.Tensor, combine: Combine) -> list[bytes]:
        """Reduce in parts: the first ranks of each host each reduce one, over the host and then over all hosts.

        The trailers of all ranks travel with the leaders' first part, and wait in the leader's message slot for the
        others.
        """

        def finish(part: torch.Tensor, number: int, message_slots: list[MessageSlot]) -> None:
            if number == 0 and self._layout.place == 0:
                message_slots[0].data[: len(trailer) * self.size] = self._across_leaders(
                    header, part, message_slots, combine
                )
            elif self._rings.across is not None:
                self._rings.across.reduce_as(header, part, b"", combine)

        message_slots = self._group.reduce(header, trailer, flat, combine, combine, self._layout.rings, finish)
        return self._trailers(message_slots[0].data, len(trailer))

    def _add_small(
        self, header: Header, trailer: bytes, rows: Sequence[torch.Tensor], division: Division, factor: float
    ) -> list[bytes]:
        """Add up shards as _reduce_small() reduces."""
        forests = [division.forests[rank] for rank in self._layout.mates]
        message_slots = self._group.post_rows(header, trailer, rows, forests)
        data, result = message_slots[0].data, rows[0]
        nbytes = result.numel() * result.element_size()
        if self._layout.place == 0:
            sums = add_data(result, message_slots, forests, division.shards)
            trailers = self._add_across_leaders(header, sums, message_slots, division, factor)
            data[nbytes:][: len(trailer) * self.size] = trailers
            data[:nbytes].view(result.dtype).copy_(result)
        self._group.meet(header)
        if self._layout.place:
            result.copy_(data[:nbytes].view(result.dtype))
        return self._trailers(data[nbytes:], len(trailer))

    def _add(
        self, header: Header, trailer: bytes, rows: Sequence[torch.Tensor], division: Division, factor: float
    ) -> list[bytes]:
        """Add up shards as _reduce() reduces, as one piece."""

        def finish(sums: list[torch.Tensor], message_slots: list[MessageSlot]) -> None:
            if self._layout.place == 0:
                trailers = self._add_across_leaders(header, sums, message_slots, division, factor)
                message_slots[0].data[: len(trailer) * self.size] = trailers
            elif self._rings.across is not None:
                self._rings.across.add_shards_as(header, sums, self._forests_of_hosts(division), b"", factor)

        forests = [division.forests[rank] for rank in self._layout.mates]
        message_slots = self._group.add_shards(header, trailer, rows, forests, self._layout.rings, finish)
        return self._trailers(message_slots[0].data, len(trailer))

    def _add_across_leaders(
        self,
        header: Header,
        sums: list[torch.Tensor],
        message_slots: list[MessageSlot],
        division: Division,
        factor: float,
    ) -> torch.Tensor:
        """Add up the leaders' nodes over the hosts. Return as _across_leaders() does."""
        packed = self._leaders.add_shards_as(
            header, sums, self._forests_of_hosts(division), self._own_trailers(header, message_slots), factor
        )
        return self._joined(header, packed)

    def _forests_of_hosts(self, division: Division) -> list[Forest]:
        """Return the forest of each host: of the sums of its ranks."""
        from farandole.training.collectives.shard_tree import merge  # loaded only in strict mode

        forests = division.forests
        return [merge(tuple(forests[rank] for rank in host), division.shards).forest for host in self._layout.hosts]

    def _across_leaders(
        self, header: Header, part: torch.Tensor, message_slots: list[MessageSlot], combine: Combine
    ) -> torch.Tensor:
        """Reduce the leaders' part over the hosts. Return the trailers of all ranks, one after the other, as bytes."""
        packed = self._leaders.reduce_as(header, part, self._own_trailers(header, message_slots), combine)
        return self._joined(header, packed)

    def _own_trailers(self, header: Header, message_slots: list[MessageSlot]) -> bytes:
        """Return the trailers of this host's ranks, as they travel."""
        mine = [bytes(message_slot.payload[HEADER_BYTES:][: header.trailer_bytes]) for message_slot in message_slots]
        return pack_trailers(mine, self._layout.most_mates)

    def _joined(self, header: Header, packed: list[bytes]) -> torch.Tensor:
        """Return the trailers of all ranks, one after the other, as bytes; `packed` are those of each host."""
        trailers = b"".join(unpack_trailers(packed, self._layout.hosts, header.trailer_bytes))
        return (
            torch.frombuffer(bytearray(trailers), dtype=torch.uint8) if trailers else torch.empty(0, dtype=torch.uint8)
        )

    def _trailers(self, data: torch.Tensor, trailer_bytes: int) -> list[bytes]:
        joined = bytes(byte_view(data[: trailer_bytes * self.size]))
        return [joined[rank * trailer_bytes :][:trailer_bytes] for rank in range(self.size)]


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
