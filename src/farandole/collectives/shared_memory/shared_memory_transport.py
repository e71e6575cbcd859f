"""Run all collectives among workers of one host: tensors move through their memory, payloads around the ring.

shared_memory_group.py moves the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.collectives.reduction import Reduction
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import HEADER_BYTES, Header, Operation
from farandole.collectives.shared_memory.control_block import DATA_BYTES, ControlBlock
from farandole.collectives.shared_memory.shared_memory_group import MAX_PAYLOAD_BYTES, SharedMemoryGroup, combine_data
from farandole.collectives.tensor_bytes import combiner, dtype_code, flat_view

_PIECE_BYTES = 1 << 20


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
            ring.rank, range(ring.size), control_blocks, ring.interruption, ring.end_by, _PIECE_BYTES
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, combine = flat_view(tensor), combiner(op)
        if flat.numel() == 0 or len(trailer) > MAX_PAYLOAD_BYTES:
            return self._ring.all_reduce(flat, trailer, op)
        nbytes = flat.numel() * flat.element_size()
        header = Header(
            Operation.ALL_REDUCE, self._ring.next_sequence, dtype_code(flat.dtype), op, nbytes, len(trailer)
        )
        with self._ring.running(header):
            if nbytes <= DATA_BYTES:
                message_slots = self._group.post(header, trailer, flat)
                combine_data(flat, message_slots, combine)
            else:
                message_slots = self._group.reduce(header, trailer, flat, combine, owners=self._size)
            return [bytes(message_slot.payload[HEADER_BYTES:][: len(trailer)]) for message_slot in message_slots]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self._size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self._size - 1}, got {source}")
        flat = flat_view(tensor)
        if flat.numel() == 0:
            self._ring.broadcast(flat, source)
            return
        nbytes = flat.numel() * flat.element_size()
        header = Header(Operation.BROADCAST, self._ring.next_sequence, dtype_code(flat.dtype), source, nbytes)
        with self._ring.running(header):
            self._group.broadcast(header, flat, source)

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
