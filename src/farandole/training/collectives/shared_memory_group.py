"""The operations of the ranks of one host in shared memory: exchange messages, reduce, broadcast, exchange parts.

Each rank reads the tensors of the others in place, or in a staging area into which the owner had to copy them, and
writes only its own. A rank reduces its part of the tensor over all ranks, then copies the other parts from the ranks
that have reduced them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from farandole.base.machine import now_s
from farandole.errors import CollectiveMismatch
from farandole.training.collectives.connection_pair import Interruption
from farandole.training.collectives.control_blocks import (
    DATA_BYTES,
    PAYLOAD_BYTES,
    ControlBlock,
    MemoryBarrier,
    MessageSlot,
)
from farandole.training.collectives.ring_header import HEADER_BYTES, Header, TransportOperation
from farandole.training.collectives.ring_schedules import Agreement, Combine, blocks, chunk_bounds, combine_in_order
from farandole.training.collectives.shared_memory_tensors import (
    TENSOR_REF_BYTES,
    OtherTensors,
    Stage,
    TensorRef,
    create_tensor,
    find_segment,
)

if TYPE_CHECKING:
    from farandole.training.collectives.shard_sums import Scratch
    from farandole.training.collectives.shard_tree import Forest


MAX_PAYLOAD_BYTES = PAYLOAD_BYTES - HEADER_BYTES - TENSOR_REF_BYTES
"""The limit of a payload beside a tensor."""

_SIZE_BYTES = 8  # of the number of a rank's bytes in an exchange

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


class Engine(Protocol):
    """What carries out the operations of a group: it numbers them, and knows when a rank is lost."""

    def next_header(
        self, operation: TransportOperation, flat: torch.Tensor | None = None, source: int = 0, trailer_bytes: int = 0
    ) -> Header: ...

    def interruption(self) -> Interruption | None:
        """Return the reason why this rank should stop waiting for the others. May raise."""
        ...

    def end_by(self, interruption: Interruption, header: Header) -> NoReturn:
        """Raise the error of such a reason."""
        ...


class Wanted(NamedTuple):
    """A part of a rank's bytes: as many as `output`, which is flat and of uint8, has, from byte `begin` on."""

    begin: int
    output: torch.Tensor


class SharedMemoryGroup:
    """The operations of the `size` ranks of this host; ranks are their places. For one thread; wake() is for any.

    All ranks call the same methods in the same order; after an error the group is unusable.

    Args:
        place: The place of this rank.
        names: The ranks' names in error messages.
        control_blocks: Those of all ranks; new ones for each generation.
        engine: Tells every few milliseconds whether this rank should go on waiting.
        piece_bytes: Tensors that others cannot read in place move in pieces of this size; all, if
            `is_always_in_pieces`.
    """

    def __init__(
        self,
        place: int,
        names: Sequence[int],
        control_blocks: Sequence[ControlBlock],
        engine: Engine,
        piece_bytes: int,
        is_always_in_pieces: bool = False,
    ) -> None:
        self.place, self.size = place, len(control_blocks)
        self._names, self._control_blocks = names, control_blocks
        self._engine = engine
        self._barrier: MemoryBarrier[Interruption] | None  # None: closed
        self._barrier = MemoryBarrier(place, control_blocks, engine.interruption)
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
            mine.data[: data.nbytes].view(data.dtype).copy_(data)
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
            self._engine.end_by(interruption, header)

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
        nbytes = rows[0].nbytes
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
        if flat.nbytes <= DATA_BYTES:
            message_slots = self.post(header, b"", flat if source == self.place else None)
            flat.copy_(message_slots[source].data[: flat.nbytes].view(flat.dtype))
        else:
            self._pass_on(header, flat, source)

    def exchange(self, header: Header, mine: torch.Tensor, wanted: Sequence[Wanted]) -> None:
        """Copy the wanted parts of the tensors of all ranks: see TensorsInMemory.exchange().

        Each rank copies from the others' bytes only what it wants. Bytes in private memory pass through the staging
        area, piece by piece; all ranks meet before each further piece.
        """
        step, mine_at = self._piece_bytes, self._stage.make_ref(mine, is_read=mine.numel() > 0)
        if mine.numel():
            self._stage.put(mine_at, mine[:step])
        message_slots = self.post(header, mine_at.pack() + mine.numel().to_bytes(_SIZE_BYTES, "big"))
        offers = [message_slot.payload[HEADER_BYTES:] for message_slot in message_slots]
        refs = [TensorRef.unpack(offer) for offer in offers]
        sizes = [int.from_bytes(offer[TENSOR_REF_BYTES:][:_SIZE_BYTES], "big") for offer in offers]
        for source, ((begin, output), size) in enumerate(zip(wanted, sizes, strict=True)):
            if begin + output.numel() > size:
                raise CollectiveMismatch(
                    f"exchange: bytes {begin} to {begin + output.numel()} of rank {source} are expected, and it has "
                    f"{size}"
                )
        begin, output = wanted[self.place]
        output.copy_(mine[begin : begin + output.numel()])
        others = self._from_mine(list(zip(refs, wanted, strict=True)))[1:]
        staged = max((size for ref, size in zip(refs, sizes, strict=True) if ref.is_staged), default=0)
        for number in range(max(1, -(-staged // step))):
            if number:
                if number * step < mine.numel():
                    self._stage.put(mine_at, mine[number * step :][:step])
                self.meet(header)
            for ref, (begin, output) in others:
                # Bytes that are readable whole are copied with the first piece.
                low, high = (number * step, (number + 1) * step) if ref.is_staged else (0, 0 if number else sys.maxsize)
                start, stop = max(begin, low), min(begin + output.numel(), high)
                if start < stop:
                    whole = self._memory(header, ref)[ref.bytes_of(number, low, stop, step)]
                    output[start - begin : stop - begin].copy_(whole[start - low :])
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
            interruption = self._engine.interruption()
            if interruption is not None:
                self._engine.end_by(interruption, header)
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
    """Add up the nodes in the data of all message slots, as add_packed() does."""
    from farandole.training.collectives.shard_sums import add_packed  # loaded only in strict mode

    return add_packed(result, [message_slot.data for message_slot in message_slots], forests, shards, factor)


def combine_data(flat: torch.Tensor, message_slots: list[MessageSlot], combine: Combine, last: Combine) -> None:
    """Reduce the tensors in the data of all message slots into `flat`."""
    tensors = (message_slot.data[: flat.nbytes].view(flat.dtype) for message_slot in message_slots)
    combine_in_order(flat, tensors, combine, last)


def trailers_of(header: Header, message_slots: Sequence[MessageSlot]) -> list[bytes]:
    """Return the trailers of all ranks of the group."""
    return [bytes(message_slot.payload[HEADER_BYTES:][: header.trailer_bytes]) for message_slot in message_slots]
