"""All collectives among workers of one host: tensors move through shared memory, words go around the ring.

Each rank reads the tensors of the others where they are, or in a staging area where the owner had to copy them to,
and writes its own only. A rank reduces its part of the tensor over all ranks, then copies the other parts from
those who have reduced them. Between the two, and at the end, all ranks meet (meeting.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from farandole.collectives.buffers import combiner, dtype_code, flat_view
from farandole.collectives.chunks import blocks, chunk_bounds
from farandole.collectives.duplex import Interruption
from farandole.collectives.reduction import Reduction
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import HEADER_BYTES, Header, Operation
from farandole.collectives.ring_schedules import Agreement, Combine
from farandole.collectives.shared_memory.meeting import Meeting
from farandole.collectives.shared_memory.offer import OFFER_BYTES, PIECE_BYTES, Offer, Stage
from farandole.collectives.shared_memory.page import DATA_BYTES, WORDS_BYTES, Page, Slot
from farandole.collectives.shared_memory.tensors import OtherTensors

# A block is combined with those of all ranks before the next one: it stays in the cache between.
_BLOCK_BYTES = 256 * 1024

T = TypeVar("T")


class SharedMemoryTransport:
    """A Transport (transport.py).

    ring   connects all ranks in the same order; close() closes it. It carries what has no tensor, and tells of
           ranks that are gone
    pages  the control pages of all ranks, by rank; new ones for each generation
    """

    def __init__(self, ring: RingTransport, pages: Sequence[Page]) -> None:
        self._ring, self._pages = ring, pages
        self._rank, self._size = ring.rank, ring.size
        self._meeting: Meeting[Interruption] = Meeting(ring.rank, pages, ring.interruption)
        self._others = OtherTensors()
        self._stage = Stage()
        self._turn = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: torch.Tensor, note: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, combine = flat_view(tensor), combiner(op)
        if flat.numel() == 0 or HEADER_BYTES + len(note) + OFFER_BYTES > WORDS_BYTES:
            return self._ring.all_reduce(flat, note, op)
        nbytes = flat.numel() * flat.element_size()
        header = Header(Operation.ALL_REDUCE, self._ring.next_sequence, dtype_code(flat.dtype), op, nbytes, len(note))
        with self._ring.running(header):
            if nbytes <= DATA_BYTES:
                slots = self._say(header, note, flat)
                _combine_into(flat, slots, combine)
            else:
                slots = self._reduce(header, note, flat, combine)
            return [bytes(slot.words[HEADER_BYTES:][: len(note)]) for slot in slots]

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
            if nbytes <= DATA_BYTES:
                slots = self._say(header, b"", flat if source == self._rank else None)
                flat.copy_(slots[source].data[:nbytes].view(flat.dtype))
            else:
                self._pass_on(header, flat, source)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._ring.all_gather(payload)

    def barrier(self) -> None:
        self._ring.barrier()

    def wait_until_called(self, wake: int) -> bool | None:
        return self._ring.wait_until_called(wake)

    def abort(self, reason: str) -> None:
        self._ring.abort(reason)
        self._meeting.wake()

    def close(self) -> None:
        """Only while no collective runs. Later calls raise GenerationEnded."""
        self._ring.close()
        self._others.close()
        self._stage.close()

    # Words -------------------------------------------------------------------------------------------------

    def _say(self, header: Header, words: bytes, data: torch.Tensor | None = None) -> list[Slot]:
        """Everybody's slot, by rank, once all have said what they are in; the same on all, or CollectiveMismatch.
        Slots are valid until the operation after the next one."""
        agreement = Agreement(header, self._rank, self._size)
        slots = [page.slot(self._turn) for page in self._pages]
        self._turn += 1
        mine = slots[self._rank]
        mine.words[: HEADER_BYTES + len(words)] = agreement.packed + words
        if data is not None:
            mine.data[: data.numel() * data.element_size()].view(data.dtype).copy_(data)
        self._meet(header)
        for back in range(1, self._size):
            agreement.check(slots[self._rank - back].words[:HEADER_BYTES], back)
        return slots

    def _meet(self, header: Header) -> None:
        """Return when all ranks have come here, too; what they stored before is there then."""
        self._meeting.arrive()
        interruption = self._meeting.wait()
        if interruption is not None:
            self._ring.end_by(interruption, header)

    # Large tensors -----------------------------------------------------------------------------------------

    def _reduce(self, header: Header, note: bytes, flat: torch.Tensor, combine: Combine) -> list[Slot]:
        """Everybody's slot, with the note. Piece by piece: all have theirs where others read it, and meet; each
        reduces its part of it, and all meet; each copies the parts of the others."""
        mine, ready = self._offer(flat)
        slots = self._say(header, note + mine.pack())
        offers = self._from_mine([Offer.unpack(slot.words[HEADER_BYTES + len(note) :]) for slot in slots])
        for number, (start, stop) in enumerate(_pieces(flat, any(offer.is_staged for offer in offers))):
            piece = flat[start:stop]
            if number:
                ready = self._stage.put(mine, piece)
                self._meet(header)
            regions = [ready[: stop - start], *(self._read(each, number, start, piece) for each in offers[1:])]
            parts = self._from_mine(chunk_bounds(stop - start, self._size))
            for low, high in blocks(*parts[0], _BLOCK_BYTES // flat.element_size()):
                reduced = regions[0][low:high]
                for region in regions[1:]:
                    combine(reduced, region[low:high], out=reduced)
            self._meet(header)
            for (low, high), region in zip(parts, regions, strict=True):
                if region is not regions[0] or mine.is_staged:
                    piece[low:high].copy_(region[low:high])
        if not all(offer.is_staged for offer in offers):
            self._meet(header)  # nobody reads any more what its owner is about to change
        return slots

    def _pass_on(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """The source's tensor, piece by piece: all meet when it is there, and the others copy it."""
        is_source = self._rank == source
        mine = self._offer(flat)[0] if is_source else None
        slots = self._say(header, b"" if mine is None else mine.pack())
        offer = Offer.unpack(slots[source].words[HEADER_BYTES:])
        for number, (start, stop) in enumerate(_pieces(flat, offer.is_staged)):
            piece = flat[start:stop]
            if number:
                if is_source:
                    self._stage.put(offer, piece)
                self._meet(header)
            if not is_source:
                piece.copy_(self._read(offer, number, start, piece))
        if not offer.is_staged:
            self._meet(header)  # as in _reduce

    def _offer(self, flat: torch.Tensor) -> tuple[Offer, torch.Tensor]:
        """What others read of this tensor, and the memory of its first piece, or of all if it need not be staged."""
        offer = self._stage.offer(flat)
        return offer, self._stage.put(offer, flat[: PIECE_BYTES // flat.element_size()] if offer.is_staged else flat)

    def _read(self, offer: Offer, number: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """Piece `number` of another rank, which begins at element `start` and has the length and dtype of `like`."""
        item_bytes = like.element_size()
        where = offer.bytes_of(number, start * item_bytes, (start + like.numel()) * item_bytes)
        return self._others.find(offer.place)[where].view(like.dtype)

    def _from_mine(self, by_rank: list[T]) -> list[T]:
        """The same in the order of this rank, the next one, ...: ranks read from different ones at a time."""
        return by_rank[self._rank :] + by_rank[: self._rank]


def _pieces(flat: torch.Tensor, is_staged: bool) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of each."""
    return blocks(0, flat.numel(), PIECE_BYTES // flat.element_size() if is_staged else flat.numel())


def _combine_into(flat: torch.Tensor, slots: list[Slot], combine: Combine) -> None:
    """Reduce the tensors in all slots, in the order of the ranks, as every rank does."""
    nbytes = flat.numel() * flat.element_size()
    first, second, *others = (slot.data[:nbytes].view(flat.dtype) for slot in slots)
    combine(first, second, out=flat)
    for other in others:
        combine(flat, other, out=flat)
