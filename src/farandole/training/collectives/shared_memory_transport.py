"""Run all collectives among workers of one host: tensors move through their memory, payloads around the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from farandole.training.collectives.connection_pair import combiners, dtype_code, flat_view
from farandole.training.collectives.control_blocks import (
    DATA_BYTES,
    ControlBlock,
    ControlBlocks,
    share_control_blocks,
)
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import HEADER_BYTES, Header, TransportOperation
from farandole.training.collectives.shared_memory_group import (
    MAX_PAYLOAD_BYTES,
    SharedMemoryGroup,
    add_data,
    combine_data,
)
from farandole.training.collectives.transport import Reduction

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division
    from farandole.training.collectives.shared_memory_exchange import Wanted

PIECE_BYTES = 1 << 20
"""The size of the pieces in which a tensor in private memory moves."""


class SharedMemoryTransport:
    """A Transport (transport.py) through shared memory.

    Args:
        ring: Connects all ranks in the same order; close() closes it. It carries operations without a tensor, and
            reports lost ranks.
        control_blocks: Those of all ranks, by rank; new ones for each generation.
    """

    def __init__(self, ring: RingTransport, control_blocks: Sequence[ControlBlock]) -> None:
        self._ring, self._rank, self._size = ring, ring.rank, ring.size
        self._group = SharedMemoryGroup(
            ring.rank, range(ring.size), control_blocks, ring.interruption, ring.end_by, PIECE_BYTES
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, (combine, last) = flat_view(tensor), combiners(op, self._size)
        if flat.numel() == 0 or len(trailer) > MAX_PAYLOAD_BYTES:
            return self._ring.all_reduce(flat, trailer, op)
        nbytes = flat.numel() * flat.element_size()
        header = Header(
            TransportOperation.ALL_REDUCE, self._ring.next_sequence, dtype_code(flat.dtype), op, nbytes, len(trailer)
        )
        with self._ring.running(header):
            if nbytes <= DATA_BYTES:
                message_slots = self._group.post(header, trailer, flat)
                combine_data(flat, message_slots, combine, last)
            else:
                message_slots = self._group.reduce(header, trailer, flat, combine, last, owners=self._size)
            return [bytes(message_slot.payload[HEADER_BYTES:][: len(trailer)]) for message_slot in message_slots]

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        flats = [flat_view(row) for row in rows]
        nbytes, forests = flats[0].numel() * flats[0].element_size(), division.forests
        if not nbytes:
            return self._ring.all_reduce_shards(flats, division, trailer, factor)
        operation, code = TransportOperation.ADD_SHARDS, dtype_code(flats[0].dtype)
        header = Header(operation, self._ring.next_sequence, code, division.shards, nbytes, len(trailer))
        with self._ring.running(header):
            if nbytes * max(map(len, forests)) <= DATA_BYTES:
                message_slots = self._group.post_rows(header, trailer, flats, forests)
                add_data(flats[0], message_slots, forests, division.shards, factor)
            else:
                message_slots = self._group.add_shards(header, trailer, flats, forests, self._size, factor=factor)
            return [bytes(message_slot.payload[HEADER_BYTES:][: len(trailer)]) for message_slot in message_slots]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self._size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self._size - 1}, got {source}")
        flat = flat_view(tensor)
        if flat.numel() == 0:
            self._ring.broadcast(flat, source)
            return
        nbytes = flat.numel() * flat.element_size()
        header = Header(TransportOperation.BROADCAST, self._ring.next_sequence, dtype_code(flat.dtype), source, nbytes)
        with self._ring.running(header):
            self._group.broadcast(header, flat, source)

    def exchange(self, mine: torch.Tensor, wanted: Sequence[Wanted]) -> None:
        """Copy parts of the tensors of all ranks, each as many bytes as this rank wants: a gather, a scatter or an
        all-to-all, in which no rank reads what others want.

        Args:
            mine: Flat and contiguous, of uint8, of any size on each rank; it may be empty.
            wanted: The part of the tensor of each rank, by rank.

        Raises:
            CollectiveMismatch: A part ends behind the end of that rank's tensor.
        """
        header = Header(TransportOperation.EXCHANGE, self._ring.next_sequence)
        with self._ring.running(header):
            self._group.exchange(header, mine, wanted)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._ring.all_gather(payload)

    def barrier(self) -> None:
        self._ring.barrier()

    def wait_for_peer(self, wake: int) -> bool | None:
        return self._ring.wait_for_peer(wake)

    def abort(self, reason: str) -> None:
        self._ring.abort(reason)
        self._group.wake()

    def close(self) -> None:
        """Close the transport; no collective may run. Later calls raise GenerationEnded."""
        self._ring.close()
        self._group.close()


def share_memory(ring: RingTransport, control_blocks: ControlBlocks | None = None) -> SharedMemoryTransport | str:
    """Return the transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    All ranks of the ring call it at once, before any other operation; `control_blocks` are given if they were shared
    before. Raises PeerLost and GenerationEnded.
    """
    shared = control_blocks or share_control_blocks(ring, range(ring.size))
    return shared if isinstance(shared, str) else SharedMemoryTransport(ring, shared)
