"""Run all collectives among workers of one host: tensors move through their memory, payloads around the ring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from farandole.training.collectives.connection_pair import combiners, flat_view
from farandole.training.collectives.control_blocks import DATA_BYTES, ControlBlock, ControlBlocks, share_control_blocks
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import Header, TransportOperation
from farandole.training.collectives.shared_memory_group import (
    MAX_PAYLOAD_BYTES,
    Engine,
    SharedMemoryGroup,
    Wanted,
    add_data,
    combine_data,
    trailers_of,
)
from farandole.training.collectives.transport import Reduction, refuse_source

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division

PIECE_BYTES = 1 << 20
"""The size of the pieces in which a tensor in private memory moves."""


class TensorsInMemory:
    """The operations on tensors of ranks that share memory: a part of a Transport (transport.py).

    Args:
        engine: Numbers the operations, and reports lost ranks.
        rank: This rank's place among them.
        names: The ranks' names in error messages.
        control_blocks: Those of all ranks, by rank; new ones for each generation.
    """

    # The group must not refer to the transport: memory that only a cycle holds is not released with the generation.
    def __init__(self, engine: Engine, rank: int, names: Sequence[int], control_blocks: Sequence[ControlBlock]) -> None:
        self.rank, self.size, self._engine = rank, len(names), engine
        self._group = SharedMemoryGroup(rank, names, control_blocks, engine, PIECE_BYTES)

    def _running(self, header: Header) -> AbstractContextManager[None]:
        """Enclose an operation. Raises if the transport has ended; any error inside ends it."""
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, (combine, last) = flat_view(tensor), combiners(op, self.size)
        header = self._engine.next_header(TransportOperation.ALL_REDUCE, flat, op, len(trailer))
        with self._running(header):
            if flat.nbytes <= DATA_BYTES:
                message_slots = self._group.post(header, trailer, flat)
                combine_data(flat, message_slots, combine, last)
            else:
                message_slots = self._group.reduce(header, trailer, flat, combine, last, owners=self.size)
            return trailers_of(header, message_slots)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        refuse_source(source, self.size)
        flat = flat_view(tensor)
        header = self._engine.next_header(TransportOperation.BROADCAST, flat, source)
        with self._running(header):
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
        header = self._engine.next_header(TransportOperation.EXCHANGE)
        with self._running(header):
            self._group.exchange(header, mine, wanted)


class SharedMemoryTransport(TensorsInMemory):
    """A Transport (transport.py) through shared memory.

    Args:
        ring: Connects all ranks in the same order; close() closes it. It carries operations without a tensor, and
            reports lost ranks.
        control_blocks: Those of all ranks, by rank; new ones for each generation.
    """

    def __init__(self, ring: RingTransport, control_blocks: Sequence[ControlBlock]) -> None:
        super().__init__(ring, ring.rank, range(ring.size), control_blocks)
        self._ring = ring

    def _running(self, header: Header) -> AbstractContextManager[None]:
        return self._ring.running(header)

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        if not tensor.numel() or len(trailer) > MAX_PAYLOAD_BYTES:  # without a tensor: it calls in wait_for_peer()
            return self._ring.all_reduce(tensor, trailer, op)
        return super().all_reduce(tensor, trailer, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.numel():
            super().broadcast(tensor, source)
        else:
            self._ring.broadcast(tensor, source)

    def all_reduce_shards(
        self, rows: Sequence[torch.Tensor], division: Division, trailer: bytes = b"", factor: float = 1.0
    ) -> list[bytes]:
        flats, forests = [flat_view(row) for row in rows], division.forests
        nbytes = flats[0].nbytes
        if not nbytes:
            return self._ring.all_reduce_shards(flats, division, trailer, factor)
        header = self._ring.next_header(TransportOperation.ADD_SHARDS, flats[0], division.shards, len(trailer))
        with self._ring.running(header):
            if nbytes * max(map(len, forests)) <= DATA_BYTES:
                message_slots = self._group.post_rows(header, trailer, flats, forests)
                add_data(flats[0], message_slots, forests, division.shards, factor)
            else:
                message_slots = self._group.add_shards(header, trailer, flats, forests, self.size, factor=factor)
            return trailers_of(header, message_slots)

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
        self._ring.close()
        self._group.close()


def share_memory(ring: RingTransport, control_blocks: ControlBlocks | None = None) -> SharedMemoryTransport | str:
    """Return the transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    All ranks of the ring call it at once, before any other operation; `control_blocks` are given if they were shared
    before. Raises PeerLost and GenerationEnded.
    """
    shared = control_blocks or share_control_blocks(ring, range(ring.size))
    return shared if isinstance(shared, str) else SharedMemoryTransport(ring, shared)
