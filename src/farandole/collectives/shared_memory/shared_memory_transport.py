"""Run all collectives among workers of one host: tensors move through their memory, payloads around the ring.

shared_memory_group.py moves the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import torch

from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import HEADER_BYTES, Header, TransportOperation
from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.control_block import CONTROL_BLOCK_BYTES, DATA_BYTES, ControlBlock
from farandole.collectives.shared_memory.shared_memory_group import MAX_PAYLOAD_BYTES, SharedMemoryGroup, combine_data
from farandole.collectives.shared_memory.tensors import SegmentRef, create_segment, open_segment
from farandole.collectives.tensor_bytes import combiner, dtype_code, flat_view
from farandole.collectives.transport import Reduction

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
            TransportOperation.ALL_REDUCE, self._ring.next_sequence, dtype_code(flat.dtype), op, nbytes, len(trailer)
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
        header = Header(TransportOperation.BROADCAST, self._ring.next_sequence, dtype_code(flat.dtype), source, nbytes)
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


# Construction from a ring ---------------------------------------------------------------------------------------------
#
# It is possible if the ranks can map each other's memory.

ControlBlocks: TypeAlias = list[ControlBlock]
"""The control block of each rank that shares memory, by rank."""


class ControlBlockRefs(msgspec.Struct, frozen=True, array_like=True):
    """The answer of one rank to the others: where its control blocks are, one for each transport; or a problem."""

    refs: tuple[SegmentRef, ...] = ()
    problem: str = ""


class OwnControlBlocks:
    """A rank's control blocks for `count` transports, which are not read by the others yet."""

    def __init__(self, rank: int, count: int) -> None:
        self._control_blocks: list[ControlBlock] = []
        self._hide: list[Callable[[], object]] = []
        refs: list[SegmentRef] = []
        problem = "" if futex.is_supported() else f"rank {rank} is not on Linux for x86-64"
        try:
            for _ in range(0 if problem else count):
                segment = create_segment(CONTROL_BLOCK_BYTES)
                self._control_blocks.append(ControlBlock(segment.memory))
                self._hide.append(segment.hide)
                refs.append(segment.ref)
        except OSError as error:
            problem = f"rank {rank} has no shared memory: {error}"
        self.refs = ControlBlockRefs((), problem) if problem else ControlBlockRefs(tuple(refs))
        """The answer to the others."""

    def open_those_of(
        self, ring: RingTransport, mates: Sequence[int], received: Sequence[ControlBlockRefs]
    ) -> list[ControlBlocks] | str:
        """Open, for each transport, the control blocks of `mates`, the ranks of this rank's host, itself included.

        Returns, on all ranks of the ring alike, the reason where that is impossible. All ranks of the ring call it at
        once; `received` are their answers. Raises PeerLost and GenerationEnded.
        """
        problem, opened = self.refs.problem, list[ControlBlocks]()
        if all(received[rank].refs for rank in mates):
            try:
                opened = [
                    [
                        control_block if rank == ring.rank else ControlBlock(open_segment(received[rank].refs[number]))
                        for rank in mates
                    ]
                    for number, control_block in enumerate(self._control_blocks)
                ]
            except OSError as error:
                problem = f"rank {ring.rank} cannot read the memory of another rank: {error}"
        problems = [each.decode() for each in ring.all_gather(problem.encode()) if each]
        for hide in self._hide:
            hide()  # all ranks have opened the control blocks, or none uses them
        return problems[0] if problems else opened


def share_memory(ring: RingTransport, control_blocks: ControlBlocks | None = None) -> SharedMemoryTransport | str:
    """Return the transport, which closes the ring when it is closed; or, on all ranks alike, why there is none.

    All ranks of the ring call it at once, before any other operation; `control_blocks` are given if they were shared
    before. Raises PeerLost and GenerationEnded.
    """
    shared = control_blocks or share_control_blocks(ring, range(ring.size))
    return shared if isinstance(shared, str) else SharedMemoryTransport(ring, shared)


def share_control_blocks(ring: RingTransport, mates: Sequence[int]) -> ControlBlocks | str:
    """Return the control blocks of `mates` for one transport of all ranks, as OwnControlBlocks.open_those_of()."""
    own = OwnControlBlocks(ring.rank, 1)
    received = ring.all_gather(msgspec.msgpack.encode(own.refs))
    opened = own.open_those_of(ring, mates, [msgspec.msgpack.decode(each, type=ControlBlockRefs) for each in received])
    return opened if isinstance(opened, str) else opened[0]
