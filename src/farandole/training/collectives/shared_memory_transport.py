"""Run all collectives among workers of one host: tensors move through their memory, payloads around the ring."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import msgspec
import torch

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import may_spin, now_s
from farandole.training.collectives.chunks import blocks, chunk_bounds
from farandole.training.collectives.connection_pair import Interruption, combiners, dtype_code, flat_view
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import HEADER_BYTES, Header, TransportOperation
from farandole.training.collectives.ring_schedules import Agreement, Combine
from farandole.training.collectives.shared_memory_tensors import (
    TENSOR_REF_BYTES,
    OtherTensors,
    SegmentRef,
    Stage,
    TensorRef,
    can_share_memory,
    create_segment,
    create_tensor,
    find_segment,
    open_segment,
    readable,
)
from farandole.training.collectives.transport import Reduction, Transport

if TYPE_CHECKING:
    from farandole.training.collectives.shard_sums import Scratch
    from farandole.training.collectives.shard_tree import Division, Forest
    from farandole.training.collectives.shared_memory_exchange import Wanted

# Control blocks -------------------------------------------------------------------------------------------------------
#
# The control block of one rank: its progress, and two message slots; and the barrier that waits on control blocks.
#
# A rank writes its own control block and reads the others'. The counter counts *arrivals*: an operation has one or
# more, the same number on all ranks, and data that a rank stored before it arrived is visible to a rank that sees it
# arrive. The two message slots alternate. A rank never writes into a message slot that may still be read: all ranks
# have read the previous message in it before they arrived again.


PAYLOAD_BYTES, DATA_BYTES = 4096, 60 * 1024
"""Sizes of the two parts of a message slot: for a payload, and for a small tensor."""

_SLOT_BYTES = PAYLOAD_BYTES + DATA_BYTES
_COUNTER_BYTES = 64  # a cache line of its own
CONTROL_BLOCK_BYTES = _COUNTER_BYTES + 2 * _SLOT_BYTES
_HALF = 2**31
_MASK = 2**32 - 1


class MessageSlot(NamedTuple):
    """A message: `payload` is bytes, `data` is a flat tensor of uint8."""

    payload: memoryview
    data: torch.Tensor


class ControlBlock:
    """A whole control block in `memory`: this rank's own, or another rank's, which is read-only."""

    def __init__(self, memory: memoryview) -> None:
        tensor = readable(memory)
        self._arrivals = memory[:_COUNTER_BYTES].cast("I")
        self._address = tensor.data_ptr()
        self._message_slots = [
            MessageSlot(memory[begin:][:PAYLOAD_BYTES], tensor[begin + PAYLOAD_BYTES :][:DATA_BYTES])
            for begin in (_COUNTER_BYTES, _COUNTER_BYTES + _SLOT_BYTES)
        ]

    def message_slot(self, turn: int) -> MessageSlot:
        """Return the message slot of turn number `turn`; 0 and 1 alternate."""
        return self._message_slots[turn % 2]

    def arrive(self) -> None:
        """Count one more arrival, and wake the ranks that wait for it."""
        self._arrivals[0] = (self._arrivals[0] + 1) & _MASK
        futex_wake(self._address)

    def has_arrived(self, times: int) -> bool:
        """Return whether this rank has arrived `times` times, counted from 0 and modulo 2**32."""
        return (self._arrivals[0] - times) & _MASK < _HALF

    def wait(self, times: int, timeout_s: float) -> None:
        """Sleep until this rank arrives again, unless it has arrived `times` times; not longer than `timeout_s`."""
        seen = self._arrivals[0]
        if (seen - times) & _MASK >= _HALF:
            futex_wait(self._address, seen, timeout_s)

    def wake(self) -> None:
        """Wake all ranks that wait for this one, for a check."""
        futex_wake(self._address)


# The barrier of all ranks: a waiting rank spins for a moment, then sleeps ---------------------------------------------

TroubleT = TypeVar("TroubleT")

# One check takes about 0.1 us. A sleep and a wake-up take 10 to 50 us, of a core that others could use.
_SPINS = 300
_SLEEP_S = 0.002  # between two checks; an abort wakes at once, except in the moment before falling asleep


class MemoryBarrier(Generic[TroubleT]):
    """A barrier on the `control_blocks` of all ranks, by rank. For one thread; wake() is for any.

    `look_around` is called every few milliseconds while this rank sleeps; it returns a reason to stop waiting, or None.
    """

    def __init__(
        self, rank: int, control_blocks: Sequence[ControlBlock], look_around: Callable[[], TroubleT | None]
    ) -> None:
        self._mine = control_blocks[rank]
        self._others = [control_block for other, control_block in enumerate(control_blocks) if other != rank]
        self._look_around = look_around
        self._spins = _SPINS if may_spin(len(control_blocks)) else 0
        self._times = 0

    def arrive(self) -> None:
        """Announce that all data that this rank has stored so far is visible."""
        self._times += 1
        self._mine.arrive()

    def wait(self) -> TroubleT | None:
        """Wait until all ranks have arrived as often as this one. Return None, or the reason to stop waiting.

        An arrival stays valid: a complete operation counts, even if a rank was lost since.
        """
        for control_block in self._others:
            for _ in range(self._spins):
                if control_block.has_arrived(self._times):
                    break
            if not control_block.has_arrived(self._times):
                with WaitingForPeers():
                    trouble = self._sleep_until_arrival(control_block)
                if trouble is not None:
                    return trouble
        return None

    def _sleep_until_arrival(self, control_block: ControlBlock) -> TroubleT | None:
        while not control_block.has_arrived(self._times):
            trouble = self._look_around()
            # Checked again: its arrival may have been its last action before it left.
            if trouble is not None and not control_block.has_arrived(self._times):
                return trouble
            control_block.wait(self._times, _SLEEP_S)
        return None

    def wake(self) -> None:
        """Make this rank check now. Callable from any thread. The others check too, and sleep on."""
        for control_block in self._others:
            control_block.wake()


# Sleep until a word of shared memory changes, and wake sleepers: Linux's futex(2), through the C library --------------

_SYSCALL = 202  # on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, until futex_wake() or for `timeout_s`. May return early.

    Releases the interpreter's lock. Raises OSError for an address that is not mapped.
    """
    whole = int(timeout_s)
    limit = _TimeSpec(whole, int((timeout_s - whole) * 1e9))
    if _syscall()(_SYSCALL, address, _WAIT, value, ctypes.byref(limit), None, 0) == -1:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, os.strerror(number))


def futex_wake(address: int) -> None:
    """Wake all threads, in all processes, that sleep on the word at `address`."""
    _syscall()(_SYSCALL, address, _WAKE, _EVERYBODY, None, None, 0)


@functools.cache
def _syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
    ]
    return call


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
    """A rank's control blocks for `count` transports, which are not read by the others yet.

    `rank` is its name in messages about problems.
    """

    def __init__(self, rank: int, count: int) -> None:
        self._rank = rank
        self._control_blocks: list[ControlBlock] = []
        self._hide: list[Callable[[], object]] = []
        refs: list[SegmentRef] = []
        problem = "" if can_share_memory() else f"rank {rank} is not on Linux for x86-64"
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
        self, ring: Transport, mates: Sequence[int], received: Sequence[ControlBlockRefs]
    ) -> list[ControlBlocks] | str:
        """Open, for each transport, the control blocks of `mates`, the ranks of this rank's host, itself included.

        Returns, on all ranks of the ring, or of a group of messages, alike, the reason where that is impossible. All
        of them call it at once; `received` are their answers. Raises PeerLost and GenerationEnded.
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
                problem = f"rank {self._rank} cannot read the memory of another rank: {error}"
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


def share_control_blocks(ring: Transport, mates: Sequence[int], name: int | None = None) -> ControlBlocks | str:
    """Return the control blocks of `mates` for one transport of all ranks, as OwnControlBlocks.open_those_of().

    `name` is this rank's in messages about problems, if that is not its rank.
    """
    own = OwnControlBlocks(ring.rank if name is None else name, 1)
    received = ring.all_gather(msgspec.msgpack.encode(own.refs))
    opened = own.open_those_of(ring, mates, [msgspec.msgpack.decode(each, type=ControlBlockRefs) for each in received])
    return opened if isinstance(opened, str) else opened[0]


# The ranks of one host, and their operations in shared memory: exchange messages, reduce, broadcast.
#
# Each rank reads the tensors of the others in place, or in a staging area into which the owner had to copy them, and
# writes only its own. A rank reduces its part of the tensor over all ranks, then copies the other parts from the
# ranks that have reduced them.


MAX_PAYLOAD_BYTES = PAYLOAD_BYTES - HEADER_BYTES - TENSOR_REF_BYTES
"""The limit of a payload beside a tensor."""

# A block is combined with those of all ranks before the next one: it stays in the cache between.
_BLOCK_BYTES = 256 * 1024

_LOSS_S = 5.0  # from the loss of a rank's memory to the end of its connections: the kernel does both
_LOOK_AGAIN_S = 0.002

T = TypeVar("T")

Finish = Callable[[torch.Tensor, int, list[MessageSlot]], None]
"""finish(this rank's part of a piece, reduced over the group; the number of the piece; the message slots of all ranks):
complete the part, in place, before the others copy it."""

FinishNodes = Callable[[list[torch.Tensor], list[MessageSlot]], None]
"""finish(the nodes of the group, of this rank's part; the message slots of all ranks): add up the part over all groups,
into the first node."""


class SharedMemoryGroup:
    """The operations of the `size` ranks of this host; ranks are their places. For one thread; wake() is for any.

    All ranks call the same methods in the same order; after an error the group is unusable.

    Args:
        place: The place of this rank.
        names: The ranks' names in error messages.
        control_blocks: Those of all ranks; new ones for each generation.
        look_around: Called every few milliseconds while this rank waits; returns a reason to stop, or None; may raise.
        end_by: Raises the error of such a reason.
        piece_bytes: Tensors that others cannot read in place move in pieces of this size; all, if
            `is_always_in_pieces`.
    """

    def __init__(
        self,
        place: int,
        names: Sequence[int],
        control_blocks: Sequence[ControlBlock],
        look_around: Callable[[], Interruption | None],
        end_by: Callable[[Interruption, Header], NoReturn],
        piece_bytes: int,
        is_always_in_pieces: bool = False,
    ) -> None:
        self.place, self.size = place, len(control_blocks)
        self._names, self._control_blocks = names, control_blocks
        self._look_around, self._end_by = look_around, end_by
        self._barrier: MemoryBarrier[Interruption] | None = MemoryBarrier(
            place, control_blocks, look_around
        )  # None: closed
        self._others = OtherTensors()
        self._stage = Stage(piece_bytes)
        self._piece_bytes, self._is_always_in_pieces = piece_bytes, is_always_in_pieces
        self._turn = 0
        self._copies: torch.Tensor | None = None  # of rows that others cannot read in place
        self._scratch: dict[torch.dtype, Scratch] = {}

    def post(self, header: Header, payload: bytes, data: torch.Tensor | None = None) -> list[MessageSlot]:
        """Return the message slots of all ranks, once all have posted the same header of their operation.

        Raises CollectiveMismatch if the headers differ. Message slots are valid until the operation after the next one.
        """
        agreement = Agreement(header, self.place, self._names)
        message_slots = [control_block.message_slot(self._turn) for control_block in self._control_blocks]
        self._turn += 1
        mine = message_slots[self.place]
        mine.payload[: HEADER_BYTES + len(payload)] = agreement.packed + payload
        if data is not None:
            mine.data[: data.numel() * data.element_size()].view(data.dtype).copy_(data)
        self.meet(header)
        for back in range(1, self.size):
            agreement.check(message_slots[self.place - back].payload[:HEADER_BYTES], back)
        return message_slots

    def meet(self, header: Header) -> None:
        """Return when all ranks have come here, too; the data that they stored before is visible then."""
        barrier = self._barrier
        assert barrier is not None, "the group is closed"
        barrier.arrive()
        interruption = barrier.wait()
        if interruption is not None:
            self._end_by(interruption, header)

    def reduce(
        self,
        header: Header,
        trailer: bytes,
        flat: torch.Tensor,
        combine: Combine,
        last: Combine,
        owners: int,
        finish: Finish | None = None,
    ) -> list[MessageSlot]:
        """Reduce a tensor piece by piece. Return the message slots of all ranks, with the trailer.

        For each piece, all ranks make theirs readable, and meet; each of the first `owners` ranks reduces its part,
        with `last` for the last of the tensors, and all meet; each copies the parts of the others.
        """
        mine, ready = self._make_ref(flat)
        message_slots = self.post(header, trailer + mine.pack())
        tensor_refs = self._from_mine(
            [TensorRef.unpack(message_slot.payload[HEADER_BYTES + len(trailer) :]) for message_slot in message_slots]
        )
        for number, (start, stop) in enumerate(
            self._pieces(flat, any(tensor_ref.is_staged for tensor_ref in tensor_refs))
        ):
            piece = flat[start:stop]
            if number:
                ready = self._stage.put(mine, piece)
                self.meet(header)
            regions = [
                ready[: stop - start],
                *(self._read(header, each, number, start, piece) for each in tensor_refs[1:]),
            ]
            parts = self._from_mine([*chunk_bounds(stop - start, owners), *[(0, 0)] * (self.size - owners)])
            for low, high in blocks(*parts[0], _BLOCK_BYTES // flat.element_size()):
                reduced = regions[0][low:high]
                for region in regions[1:-1]:
                    combine(reduced, region[low:high], out=reduced)
                if self.size > 1:
                    last(reduced, regions[-1][low:high], out=reduced)
            if finish is not None and self.place < owners:
                finish(regions[0][slice(*parts[0])], number, message_slots)
            self.meet(header)
            for (low, high), region in zip(parts, regions, strict=True):
                if region is not regions[0] or mine.is_staged:
                    piece[low:high].copy_(region[low:high])
        if not all(tensor_ref.is_staged for tensor_ref in tensor_refs):
            self.meet(header)  # no rank reads any more the memory that its owner is about to change
        return message_slots

    def post_rows(
        self, header: Header, trailer: bytes, rows: Sequence[torch.Tensor], forests: Sequence[Forest]
    ) -> list[MessageSlot]:
        """Post the nodes of this rank as data; `forests` by place."""
        mine = rows[: len(forests[self.place])]
        return self.post(header, trailer, torch.cat(list(mine)) if mine else None)

    def add_shards(
        self,
        header: Header,
        trailer: bytes,
        rows: Sequence[torch.Tensor],
        forests: Sequence[Forest],
        owners: int,
        finish: FinishNodes | None = None,
        factor: float = 1.0,
    ) -> list[MessageSlot]:
        """Add up the nodes of all ranks, `forests` by place, into the first row, times `factor` unless `finish` does
        so. Return the message slots of all ranks, with the trailer.

        All ranks make their rows readable, and meet; each of the first `owners` ranks adds up its part, and all meet;
        each copies the parts of the others. `header.source` is the number of shards.
        """
        from farandole.training.collectives.shard_sums import Scratch, add_nodes  # loaded only in strict mode
        from farandole.training.collectives.shard_tree import merge

        mine = self._readable_rows(rows)
        refs = b"".join(self._stage.make_ref(row).pack() for row in mine)
        message_slots = self.post(header, trailer + refs)
        regions = [
            mine if place == self.place else self._read_rows(header, message_slot, len(trailer), len(forest), rows[0])
            for place, (message_slot, forest) in enumerate(zip(message_slots, forests, strict=True))
        ]
        parts = [*chunk_bounds(rows[0].numel(), owners), *[(0, 0)] * (self.size - owners)]
        plan = merge(tuple(forests), header.source)
        nodes = [row for region, forest in zip(regions, forests, strict=True) for row in region[: len(forest)]]
        are_own = [place == self.place for place, forest in enumerate(forests) for _ in forest]
        block, (begin, end) = _BLOCK_BYTES // rows[0].element_size(), parts[self.place]
        scratch = self._scratch.setdefault(rows[0].dtype, Scratch(block, rows[0].dtype))
        sums = [mine[0][begin:end]]
        if finish is not None and self.place < owners:
            sums = [torch.empty_like(sums[0]) for _ in plan.forest] or sums
        for low, high in blocks(begin, end, block) if nodes else ():
            operands = [node[low:high] for node in nodes]
            if finish is None:
                add_nodes(plan, operands, are_own, scratch, mine[0][low:high], factor)
                continue
            for each, found in zip(sums, add_nodes(plan, operands, are_own, scratch), strict=True):
                each[low - begin : high - begin].copy_(found)
        if finish is not None and self.place < owners:
            finish(sums, message_slots)
            mine[0][begin:end].copy_(sums[0])
        self.meet(header)
        for (low, high), region in zip(parts, regions, strict=True):
            if region is not mine or mine[0] is not rows[0]:
                rows[0][low:high].copy_(region[0][low:high])
        self.meet(header)  # no rank reads any more the memory that its owner is about to change
        return message_slots

    def _readable_rows(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the rows, or copies of them in memory that the others can read."""
        if all(find_segment(row) is not None for row in rows):
            return rows
        nbytes = rows[0].numel() * rows[0].element_size()
        if self._copies is None or self._copies.numel() < len(rows) * nbytes:
            self._copies = create_tensor(len(rows) * nbytes)
        copies = self._copies[: len(rows) * nbytes].view(len(rows), nbytes).view(rows[0].dtype)
        return [copy.copy_(row) for copy, row in zip(copies, rows, strict=True)]

    def _read_rows(
        self, header: Header, message_slot: MessageSlot, trailer_bytes: int, nodes: int, like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the rows of another rank, of which there is one at least."""
        packed = message_slot.payload[HEADER_BYTES + trailer_bytes :]
        refs = [TensorRef.unpack(packed[number * TENSOR_REF_BYTES :]) for number in range(max(1, nodes))]
        return [self._read(header, ref, 0, 0, like) for ref in refs]

    def broadcast(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """Copy the tensor of the rank at place `source` into every rank's."""
        nbytes = flat.numel() * flat.element_size()
        if nbytes <= DATA_BYTES:
            message_slots = self.post(header, b"", flat if source == self.place else None)
            flat.copy_(message_slots[source].data[:nbytes].view(flat.dtype))
        else:
            self._pass_on(header, flat, source)

    def exchange(self, header: Header, mine: torch.Tensor, wanted: Sequence[Wanted]) -> None:
        """Copy the wanted parts of the tensors of all ranks: see SharedMemoryTransport.exchange()."""
        from farandole.training.collectives.shared_memory_exchange import (  # loaded only where it is needed
            offer,
            take_parts,
        )

        own = offer(mine, self._stage, self._piece_bytes)
        message_slots = self.post(header, own.pack())
        payloads = [message_slot.payload[HEADER_BYTES:] for message_slot in message_slots]
        for part in take_parts(own, payloads, self.place, wanted):
            if part is None:
                self.meet(header)
            else:
                part.copy_from(self._memory(header, part.ref))
        self.meet(header)  # as in reduce(); nor does a rank leave before all have opened its memory

    def wake(self) -> None:
        """Make this rank check now, if it waits. Callable from any thread."""
        barrier = self._barrier  # held: close() in another thread must not unmap the memory to be woken
        if barrier is not None:
            barrier.wake()

    def close(self) -> None:
        """Release the control blocks, even if the group is still referenced; no operation may run. Idempotent."""
        self._control_blocks, self._barrier = (), None
        self._others.close()
        self._stage.close()
        self._copies = None

    def _pass_on(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """Copy the source's tensor, piece by piece: all meet when a piece is readable, and the others copy it."""
        is_source = self.place == source
        mine = self._make_ref(flat)[0] if is_source else None
        message_slots = self.post(header, b"" if mine is None else mine.pack())
        tensor_ref = TensorRef.unpack(message_slots[source].payload[HEADER_BYTES:])
        for number, (start, stop) in enumerate(self._pieces(flat, tensor_ref.is_staged)):
            piece = flat[start:stop]
            if number:
                if is_source:
                    self._stage.put(tensor_ref, piece)
                self.meet(header)
            if not is_source:
                piece.copy_(self._read(header, tensor_ref, number, start, piece))
        self.meet(header)  # as in reduce(); nor does the source leave before all have opened its memory

    def _make_ref(self, flat: torch.Tensor) -> tuple[TensorRef, torch.Tensor]:
        """Return the reference for readers of the tensor and the memory of its first piece, or of all unless staged."""
        tensor_ref = self._stage.make_ref(flat, is_read=self.size > 1)
        if not tensor_ref.is_staged:
            return tensor_ref, flat
        return tensor_ref, self._stage.put(tensor_ref, flat[: self._piece_bytes // flat.element_size()])

    def _read(self, header: Header, tensor_ref: TensorRef, number: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return piece `number` of another rank, from element `start`, with the length and dtype of `like`."""
        item_bytes = like.element_size()
        where = tensor_ref.bytes_of(number, start * item_bytes, (start + like.numel()) * item_bytes, self._piece_bytes)
        return self._memory(header, tensor_ref)[where].view(like.dtype)

    def _memory(self, header: Header, tensor_ref: TensorRef) -> torch.Tensor:
        """Return the whole segment of another rank."""
        try:
            return self._others.find(tensor_ref.segment)
        except OSError:
            self._end_by_loss(header)
            raise

    def _end_by_loss(self, header: Header) -> None:
        """End after a rank's memory has vanished: that rank is gone, as the ring will report in a moment."""
        deadline_s = now_s() + _LOSS_S
        while now_s() < deadline_s:
            interruption = self._look_around()
            if interruption is not None:
                self._end_by(interruption, header)
            Event().wait(_LOOK_AGAIN_S)

    def _pieces(self, flat: torch.Tensor, is_staged: bool) -> Iterator[tuple[int, int]]:
        """Yield the elements [start, stop) of each piece."""
        in_pieces = is_staged or self._is_always_in_pieces
        return blocks(0, flat.numel(), self._piece_bytes // flat.element_size() if in_pieces else flat.numel())

    def _from_mine(self, by_place: list[T]) -> list[T]:
        """Return the list in the order of this rank, the next one, ...: ranks read from different ones at a time."""
        return by_place[self.place :] + by_place[: self.place]


def add_data(
    result: torch.Tensor,
    message_slots: Sequence[MessageSlot],
    forests: Sequence[Forest],
    shards: int,
    factor: float = 1.0,
) -> list[torch.Tensor]:
    """Add up the nodes in the data of all message slots. Return the sums, in memory of this rank, the first one in
    `result`, times `factor`; on whichever rank."""
    from farandole.training.collectives.shard_sums import Scratch, add_nodes  # loaded only in strict mode
    from farandole.training.collectives.shard_tree import merge

    numel, nbytes = result.numel(), result.numel() * result.element_size()
    operands = [
        message_slot.data[place * nbytes : (place + 1) * nbytes].view(result.dtype)
        for message_slot, forest in zip(message_slots, forests, strict=True)
        for place in range(len(forest))
    ]
    if not operands:
        return [result]
    plan = merge(tuple(forests), shards)
    first, *others = add_nodes(plan, operands, [False] * len(operands), Scratch(numel, result.dtype))
    result.copy_(first)
    if factor != 1.0:
        result.mul_(factor)
    return [result, *(each.clone() for each in others)]


def combine_data(flat: torch.Tensor, message_slots: list[MessageSlot], combine: Combine, last: Combine) -> None:
    """Reduce the tensors in the data of all message slots into `flat`, in the order of the ranks, on whichever rank."""
    nbytes = flat.numel() * flat.element_size()
    first, *others = (message_slot.data[:nbytes].view(flat.dtype) for message_slot in message_slots)
    for number, other in enumerate(others, start=1):
        function = last if number == len(others) else combine
        function(flat if number > 1 else first, other, out=flat)
