"""The ranks of one host, and what they do through their memory: say words, reduce, broadcast. The transports that
move tensors this way are made of it.

Each rank reads the tensors of the others where they are, or in a staging area where the owner had to copy them to,
and writes its own only. A rank reduces its part of the tensor over all ranks, then copies the other parts from
those who have reduced them. Between the two, and at the end, all ranks meet (meeting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import NoReturn, TypeVar

import torch

from farandole.clock import now_s
from farandole.collectives.chunks import blocks, chunk_bounds
from farandole.collectives.duplex import Interruption
from farandole.collectives.ring_header import HEADER_BYTES, Header
from farandole.collectives.ring_schedules import Agreement, Combine
from farandole.collectives.shared_memory.exposure import EXPOSURE_BYTES, Exposure, Stage
from farandole.collectives.shared_memory.meeting import Meeting
from farandole.collectives.shared_memory.page import DATA_BYTES, WORDS_BYTES, Page, Panel
from farandole.collectives.shared_memory.tensors import OtherTensors

MOST_WORDS_BYTES = WORDS_BYTES - HEADER_BYTES - EXPOSURE_BYTES
"""Beside a tensor."""

# A block is combined with those of all ranks before the next one: it stays in the cache between.
_BLOCK_BYTES = 256 * 1024

_LOSS_S = 5.0  # from the loss of a rank's memory to the end of its connections: both are its kernel's business
_LOOK_AGAIN_S = 0.002

T = TypeVar("T")

Finish = Callable[[torch.Tensor, int, list[Panel]], None]
"""finish(this rank's part of a piece, reduced over the group; the number of the piece; everybody's panel): what else
has to be done with it, in place, before the others copy it"""


class Group:
    """For one thread; wake() is for any. All ranks call the same methods in the same order; an error leaves the group
    useless. Ranks are places among the `size` ranks of this host.

    place           of this rank
    names           what the ranks are called in error messages
    pages           the control pages of all; new ones for each generation
    look_around     asked every few milliseconds while this rank waits: why it should not, or None; may raise
    end_by          raises what follows from that
    piece_bytes     tensors that others cannot read where they are move in pieces of this size; all, if
                    `is_always_in_pieces`
    """

    def __init__(
        self,
        place: int,
        names: Sequence[int],
        pages: Sequence[Page],
        look_around: Callable[[], Interruption | None],
        end_by: Callable[[Interruption, Header], NoReturn],
        piece_bytes: int,
        is_always_in_pieces: bool = False,
    ) -> None:
        self.place, self.size = place, len(pages)
        self._names, self._pages = names, pages
        self._look_around, self._end_by = look_around, end_by
        self._meeting: Meeting[Interruption] | None = Meeting(place, pages, look_around)  # None: closed
        self._others = OtherTensors()
        self._stage = Stage(piece_bytes)
        self._piece_bytes, self._is_always_in_pieces = piece_bytes, is_always_in_pieces
        self._turn = 0

    def say(self, header: Header, words: bytes, data: torch.Tensor | None = None) -> list[Panel]:
        """Everybody's panel, once all have said what they are in; the same on all, or CollectiveMismatch. Panels are
        valid until the operation after the next one."""
        agreement = Agreement(header, self.place, self._names)
        panels = [page.panel(self._turn) for page in self._pages]
        self._turn += 1
        mine = panels[self.place]
        mine.words[: HEADER_BYTES + len(words)] = agreement.packed + words
        if data is not None:
            mine.data[: data.numel() * data.element_size()].view(data.dtype).copy_(data)
        self.meet(header)
        for back in range(1, self.size):
            agreement.check(panels[self.place - back].words[:HEADER_BYTES], back)
        return panels

    def meet(self, header: Header) -> None:
        """Return when all ranks have come here, too; what they stored before is there then."""
        meeting = self._meeting
        assert meeting is not None, "nothing is said in a closed group"
        meeting.arrive()
        interruption = meeting.wait()
        if interruption is not None:
            self._end_by(interruption, header)

    def reduce(
        self,
        header: Header,
        note: bytes,
        flat: torch.Tensor,
        combine: Combine,
        owners: int,
        finish: Finish | None = None,
    ) -> list[Panel]:
        """Everybody's panel, with the note. Piece by piece: all have theirs where others read it, and meet; each of the
        first `owners` ranks reduces its part of it, and all meet; each copies the parts of the others."""
        mine, ready = self._expose(flat)
        panels = self.say(header, note + mine.pack())
        exposures = self._from_mine([Exposure.unpack(panel.words[HEADER_BYTES + len(note) :]) for panel in panels])
        for number, (start, stop) in enumerate(self._pieces(flat, any(exposure.is_staged for exposure in exposures))):
            piece = flat[start:stop]
            if number:
                ready = self._stage.put(mine, piece)
                self.meet(header)
            regions = [
                ready[: stop - start],
                *(self._read(header, each, number, start, piece) for each in exposures[1:]),
            ]
            parts = self._from_mine([*chunk_bounds(stop - start, owners), *[(0, 0)] * (self.size - owners)])
            for low, high in blocks(*parts[0], _BLOCK_BYTES // flat.element_size()):
                reduced = regions[0][low:high]
                for region in regions[1:]:
                    combine(reduced, region[low:high], out=reduced)
            if finish is not None and self.place < owners:
                finish(regions[0][slice(*parts[0])], number, panels)
            self.meet(header)
            for (low, high), region in zip(parts, regions, strict=True):
                if region is not regions[0] or mine.is_staged:
                    piece[low:high].copy_(region[low:high])
        if not all(exposure.is_staged for exposure in exposures):
            self.meet(header)  # nobody reads any more what its owner is about to change
        return panels

    def broadcast(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """The tensor of the rank at place `source` into everybody's."""
        nbytes = flat.numel() * flat.element_size()
        if nbytes <= DATA_BYTES:
            panels = self.say(header, b"", flat if source == self.place else None)
            flat.copy_(panels[source].data[:nbytes].view(flat.dtype))
        else:
            self._pass_on(header, flat, source)

    def wake(self) -> None:
        """From any thread: have this rank look around now, if it waits."""
        meeting = self._meeting  # held here: close() in another thread must not unmap what is being woken
        if meeting is not None:
            meeting.wake()

    def close(self) -> None:
        """Only while nobody is in an operation. Gives the pages back, whoever still holds the group. Idempotent."""
        self._pages, self._meeting = (), None
        self._others.close()
        self._stage.close()

    def _pass_on(self, header: Header, flat: torch.Tensor, source: int) -> None:
        """The source's tensor, piece by piece: all meet when it is there, and the others copy it."""
        is_source = self.place == source
        mine = self._expose(flat)[0] if is_source else None
        panels = self.say(header, b"" if mine is None else mine.pack())
        exposure = Exposure.unpack(panels[source].words[HEADER_BYTES:])
        for number, (start, stop) in enumerate(self._pieces(flat, exposure.is_staged)):
            piece = flat[start:stop]
            if number:
                if is_source:
                    self._stage.put(exposure, piece)
                self.meet(header)
            if not is_source:
                piece.copy_(self._read(header, exposure, number, start, piece))
        self.meet(header)  # as in reduce(); nor does the source go before all have opened its memory

    def _expose(self, flat: torch.Tensor) -> tuple[Exposure, torch.Tensor]:
        """What others read of this tensor, and the memory of its first piece, or of all if it need not be staged."""
        exposure = self._stage.expose(flat, is_read=self.size > 1)
        if not exposure.is_staged:
            return exposure, flat
        return exposure, self._stage.put(exposure, flat[: self._piece_bytes // flat.element_size()])

    def _read(self, header: Header, exposure: Exposure, number: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """Piece `number` of another rank, which begins at element `start` and has the length and dtype of `like`."""
        item_bytes = like.element_size()
        where = exposure.bytes_of(number, start * item_bytes, (start + like.numel()) * item_bytes, self._piece_bytes)
        try:
            whole = self._others.find(exposure.place)
        except OSError:
            self._end_by_loss(header)
            raise
        return whole[where].view(like.dtype)

    def _end_by_loss(self, header: Header) -> None:
        """Memory that is not there any more is that of a rank which is gone, as will be known in a moment."""
        deadline_s = now_s() + _LOSS_S
        while now_s() < deadline_s:
            interruption = self._look_around()
            if interruption is not None:
                self._end_by(interruption, header)
            Event().wait(_LOOK_AGAIN_S)

    def _pieces(self, flat: torch.Tensor, is_staged: bool) -> Iterator[tuple[int, int]]:
        """Elements [start, stop) of each."""
        in_pieces = is_staged or self._is_always_in_pieces
        return blocks(0, flat.numel(), self._piece_bytes // flat.element_size() if in_pieces else flat.numel())

    def _from_mine(self, by_place: list[T]) -> list[T]:
        """The same in the order of this rank, the next one, ...: ranks read from different ones at a time."""
        return by_place[self.place :] + by_place[: self.place]


def combine_data(flat: torch.Tensor, panels: list[Panel], combine: Combine) -> None:
    """Reduce the tensors in the data of all panels into `flat`, in the order of the ranks, as whoever does it."""
    nbytes = flat.numel() * flat.element_size()
    first, *others = (panel.data[:nbytes].view(flat.dtype) for panel in panels)
    for number, other in enumerate(others):
        combine(flat if number else first, other, out=flat)
