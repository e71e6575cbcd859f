"""The exchange of parts among ranks that share memory: each rank copies from the others' bytes only what it wants.

It carries out gather, scatter and all-to-all of torch.distributed. shared_memory_transport.py runs it: all ranks post a
reference to their bytes, then copy. Bytes in private memory pass through the staging area, piece by piece; all ranks
meet before each further piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from farandole.errors import CollectiveMismatch
from farandole.training.collectives.shared_memory_tensors import TENSOR_REF_BYTES, Stage, TensorRef

_SIZE_BYTES = 8


class Wanted(NamedTuple):
    """A part of a rank's bytes: as many as `output`, which is flat and of uint8, has, from byte `begin` on."""

    begin: int
    output: torch.Tensor


class Offer(NamedTuple):
    """The bytes of this rank, of which the first piece is readable."""

    mine: torch.Tensor
    ref: TensorRef
    stage: Stage
    piece_bytes: int

    def pack(self) -> bytes:
        return self.ref.pack() + self.mine.numel().to_bytes(_SIZE_BYTES, "big")

    def put(self, number: int) -> None:
        """Make piece `number` readable, if there is one and it has to be copied for that."""
        piece = self.mine[number * self.piece_bytes :][: self.piece_bytes]
        if self.ref.is_staged and piece.numel():
            self.stage.put(self.ref, piece)


class Part(NamedTuple):
    """A copy that is due: bytes of another rank's segment from `at` on, into `output`."""

    ref: TensorRef
    at: int
    output: torch.Tensor

    def copy_from(self, segment: torch.Tensor) -> None:
        self.output.copy_(segment[self.at : self.at + self.output.numel()])


def offer(mine: torch.Tensor, stage: Stage, piece_bytes: int) -> Offer:
    """Make the first piece of this rank's bytes readable. Raises OSError when there is no memory for a staging area."""
    offered = Offer(mine, stage.make_ref(mine, is_read=mine.numel() > 0), stage, piece_bytes)
    offered.put(0)
    return offered


def take_parts(
    own: Offer, payloads: Sequence[memoryview], place: int, wanted: Sequence[Wanted]
) -> Iterator[Part | None]:
    """Yield the copies that are due, from the next rank on; None: all ranks have to meet before the next piece.

    Args:
        own: That of this rank, at `place`; its part is copied here.
        payloads: The packed offers of all ranks.
        wanted: The part of the bytes of each rank.

    Raises:
        CollectiveMismatch: A part ends behind the end of a rank's bytes.
    """
    refs = [TensorRef.unpack(payload) for payload in payloads]
    sizes = [int.from_bytes(payload[TENSOR_REF_BYTES:][:_SIZE_BYTES], "big") for payload in payloads]
    for source, ((begin, output), size) in enumerate(zip(wanted, sizes, strict=True)):
        if begin + output.numel() > size:
            raise CollectiveMismatch(
                f"exchange: bytes {begin} to {begin + output.numel()} of rank {source} are expected, and it has {size}"
            )
    begin, output = wanted[place]
    output.copy_(own.mine[begin : begin + output.numel()])
    others = [*range(place + 1, len(wanted)), *range(place)]
    staged = max((size for ref, size in zip(refs, sizes, strict=True) if ref.is_staged), default=0)
    for number in range(max(1, -(-staged // own.piece_bytes))):
        if number:
            own.put(number)
            yield None
        for source in others:
            part = _part_of_piece(refs[source], wanted[source], number, own.piece_bytes)
            if part is not None:
                yield part


def _part_of_piece(ref: TensorRef, wanted: Wanted, number: int, piece_bytes: int) -> Part | None:
    """Return what is wanted of a piece; of bytes that are readable whole, with piece 0. None: nothing."""
    begin, output = wanted
    low, high = number * piece_bytes, (number + 1) * piece_bytes
    if not ref.is_staged:
        low, high = 0, 0 if number else begin + output.numel()
    start, stop = max(begin, low), min(begin + output.numel(), high)
    if start >= stop:
        return None
    at = ref.bytes_of(number, low, stop, piece_bytes).start + start - low
    return Part(ref, at, output[start - begin : stop - begin])
