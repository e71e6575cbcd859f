"""References to this rank's memory in an operation: its tensor itself, or a staging area.

shared_memory_transport.py puts tensor references into message slots. A tensor in private memory is copied into the
staging area, piece by piece. The area has two halves that alternate, from one operation to the next, too: one is filled
while others may still read the other one.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from farandole.collectives.shared_memory.segment import SEGMENT_REF_BYTES, SegmentRef
from farandole.collectives.shared_memory.tensors import create_tensor, find_segment

_WHOLE = 2
_NO_SEGMENT = SegmentRef(0, 0, 0, 0, 0)

_LAYOUT = struct.Struct("=2Q")

TENSOR_REF_BYTES = SEGMENT_REF_BYTES + _LAYOUT.size


class TensorRef(NamedTuple):
    """The place of a tensor, or of a staging area, in a segment.

    Attributes:
        offset: That of the tensor in its segment, in bytes; 0 for a staging area.
        first_half: The first half of the staging area; _WHOLE if the tensor itself is there, whole.
    """

    segment: SegmentRef
    offset: int
    first_half: int

    @property
    def is_staged(self) -> bool:
        return self.first_half != _WHOLE

    def pack(self) -> bytes:
        return self.segment.pack() + _LAYOUT.pack(self.offset, self.first_half)

    @staticmethod
    def unpack(packed: memoryview) -> TensorRef:
        return TensorRef(
            SegmentRef.unpack(packed[:SEGMENT_REF_BYTES]), *_LAYOUT.unpack(packed[SEGMENT_REF_BYTES:TENSOR_REF_BYTES])
        )

    def bytes_of(self, piece: int, start: int, stop: int, piece_bytes: int) -> slice:
        """Return the place in the segment of piece number `piece`: bytes [start, stop) of the tensor."""
        begin = (self.first_half + piece) % 2 * piece_bytes if self.is_staged else self.offset + start
        return slice(begin, begin + stop - start)


class Stage:
    """The staging area of this rank, for pieces of up to `piece_bytes`; made when first needed. For one thread."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._area: torch.Tensor | None = None
        self._filled = 0  # the number of pieces, in all operations

    def make_ref(self, flat: torch.Tensor, is_read: bool = True) -> TensorRef:
        """Return the reference to a contiguous tensor, which no rank needs to read unless `is_read`.

        Raises OSError when there is no memory for a staging area.
        """
        where = find_segment(flat) if is_read else (_NO_SEGMENT, 0)
        if where is not None:
            return TensorRef(*where, _WHOLE)
        if self._area is None:
            self._area = create_tensor(2 * self._piece_bytes)
        area = find_segment(self._area)
        assert area is not None
        return TensorRef(*area, self._filled % 2)

    def put(self, tensor_ref: TensorRef, piece: torch.Tensor) -> torch.Tensor:
        """Make the next piece of the tensor readable for others.

        Returns that memory, which is the piece's own if the tensor is there whole.
        """
        if not tensor_ref.is_staged:
            return piece
        assert self._area is not None
        begin = self._filled % 2 * self._piece_bytes
        half = self._area[begin : begin + piece.numel() * piece.element_size()].view(piece.dtype)
        half.copy_(piece)
        self._filled += 1
        return half

    def close(self) -> None:
        self._area = None
