"""The digests of one rank's state, and their schedule: a block every few steps, a sample where time is short, or
everything.

sync.py compares these digests, and the step header carries them (optim/header.py). The state is hashed at boundaries
only, where the state of all ranks is that of the last decided step.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch

from farandole.state.digest_schedule import TURN, ByteRange, block_at, cut, is_due, sample_at
from farandole.state.named_tensors import NamedTensor
from farandole.state.packing import as_bytes, memory_at

STRIKES = 3


class StateDigest:
    """The digests of one state.

    tensors  returns all compared tensors, as they are now (named_tensors.py)

    is_suspicious  a step header has shown that ranks differ: everything is to be compared
    local          names of tensors that each rank computes from its own local batch: they are not compared. Never
                   tensors of parameters and optimizers
    suspects       tensors that differed and were made equal, with the number of times that they have differed again
                   after a single step. Tensors that do so STRIKES times in a row are local
    """

    def __init__(self, tensors: Callable[[], list[NamedTensor]]) -> None:
        self._tensors = tensors
        self._layout: _BlockLayout | None = None
        self._equal_at = 0  # the step at which the suspects were made equal
        self.is_suspicious = False
        self.local: frozenset[str] = frozenset()
        self.suspects: Mapping[str, int] = {}

    def of_due_block(self, step: int) -> int:
        """Return the digest for the header of this step: that of the block that is due; 0 when none is."""
        if self.suspects and step > self._equal_at:
            if step == self._equal_at + 1:
                return self._of_suspects(step)
            self.suspects = {}
        return self._of_block(step) if is_due(step) else 0

    def of_sample(self, step: int, trained_only: bool) -> int:
        """Return a digest of a sample that is read in a few milliseconds, of the tensors as they are now."""
        layout = self._begin_layout(step, (each for each in self._tensors() if each.is_trained or not trained_only))
        return digest(layout.pieces(sample_at(step, layout.sizes, layout.blocks)) or ())

    def by_name(self) -> dict[str, int]:
        """Return the digest of each tensor that no optimizer changes. sync.py reads the others itself."""
        found = ((each.name, each.find()) for each in self._compared() if not each.is_trained)
        return {name: digest_of([tensor]) for name, tensor in found if tensor is not None}

    def resolved(self, step: int, repaired: Mapping[str, int], local: Collection[str]) -> None:
        """Note that all ranks have the same state again.

        Args:
            step: Number of decided steps.
            repaired: Names of buffers and tracked tensors that differed, as `suspects`.
            local: Names of the tensors that no comparison includes from now on.
        """
        self.is_suspicious, self._layout = False, None
        self.local, self.suspects, self._equal_at = frozenset(local), repaired, step

    def _of_block(self, step: int) -> int:
        layout = self._layout
        if layout is None or layout.is_outdated(step):
            layout = self._begin_layout(step, self._compared())
            self._layout = layout
        pieces = layout.pieces(layout.blocks[block_at(step, len(layout.blocks))])
        if pieces is None:  # the tensors are not those of the layout
            self._layout = layout = self._begin_layout(step, self._compared())
            pieces = layout.pieces(layout.blocks[block_at(step, len(layout.blocks))]) or []
        return digest(pieces)

    def _of_suspects(self, step: int) -> int:
        found = (each.find() for each in self._compared() if each.name in self.suspects)
        pieces = [as_bytes(tensor) for tensor in found if tensor is not None]
        block = self._of_block(step) if is_due(step) else 0
        return (digest(pieces) ^ block) or 1

    def _compared(self) -> Iterator[NamedTensor]:
        return (each for each in self._tensors() if each.name not in self.local)

    def _begin_layout(self, step: int, tensors: Iterable[NamedTensor]) -> _BlockLayout:
        return _BlockLayout(step, list(tensors))


class _BlockLayout:
    """The tensors of a state, and the blocks into which they are cut.

    It is made anew in each turn, after a sync, and when a tensor was replaced, on all ranks at the same step. In the
    first steps it is made more often, since optimizers create their state in their first step.
    """

    def __init__(self, step: int, tensors: Sequence[NamedTensor]) -> None:
        self._step, self._tensors = step, tensors
        self._shapes = []
        self.sizes = []
        for each in tensors:
            tensor = each.find()
            assert tensor is not None, "the tensor was found before"
            self._shapes.append((tensor.shape, tensor.dtype))
            self.sizes.append(tensor.numel() * tensor.element_size())
        self.blocks = cut(self.sizes)

    def is_outdated(self, step: int) -> bool:
        return step // TURN != self._step // TURN or step <= 16

    def pieces(self, parts: Sequence[ByteRange]) -> list[Piece] | None:
        """Return the bytes of these parts; None when a tensor does not exist any more, or has another shape."""
        found: list[Piece] = []
        for place, start, stop in parts:
            tensor = self._tensors[place].find()
            if tensor is None or (tensor.shape, tensor.dtype) != self._shapes[place]:
                return None
            found.append(_bytes(tensor, start, stop))
        return found


def _bytes(tensor: torch.Tensor, start: int, stop: int) -> Piece:
    """Return bytes [start, stop) of a tensor in its logical order. Of a tensor that is not contiguous, only the needed
    rows are copied."""
    if tensor.is_contiguous() or tensor.dim() == 0:
        if tensor.is_cpu and stop - start < LONG_BYTES:
            return memory_at(tensor, start, stop)
        return as_bytes(tensor)[start:stop]
    row = tensor.numel() * tensor.element_size() // tensor.shape[0]
    first, last = start // row, -(-stop // row)
    return as_bytes(tensor[first:last])[start - first * row : stop - first * row]


# A 64-bit digest of tensors, which tells copies of one state apart at memory speed; not for security ------------------
#
# Long pieces are hashed multilinearly: each 32-bit word is multiplied by a random odd 64-bit number that belongs to
# its place, and the products are added up modulo 2^64; the sums of rows of words are the coefficients of a polynomial
# (D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014). Shorter pieces go through CRC-32: in a
# step, where neither torch's operations nor their operands are in the caches, the sums take 0.3 ms more. A change of
# a single word always changes the digest. Any other change, such as swapped values or signs, changes it except with a
# probability of about 2^-32.
#
# Words of 64 bits would be three times as fast, and would miss every pair of changed signs of float64: their highest
# bits cancel modulo 2^64.


_ROW_WORDS = 8192
_ROWS = 4  # at once: their products stay in the cache
LONG_BYTES = 1 << 19
"""Pieces that are shorter are hashed by CRC-32."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


Piece: TypeAlias = torch.Tensor | memoryview
"""A 1-D uint8 tensor of any length on any device, or its memory, if that is shorter than LONG_BYTES."""


def digest(pieces: Iterable[Piece]) -> int:
    """Return the digest of the pieces.

    The digest depends on the bytes and the lengths alone. It is never 0, which stands for "nothing was hashed".
    """
    value, crc = 1, 0
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for piece in pieces:
        if isinstance(piece, memoryview):
            value, crc = (value * _MULTIPLIER + len(piece)) & _MASK, zlib.crc32(piece, crc)
            continue
        length = piece.numel()
        value = (value * _MULTIPLIER + length) & _MASK
        if length >= LONG_BYTES:  # whatever its alignment: all ranks must compute the same
            whole = length // 4 * 4
            value = _add(value, piece[:whole])
            piece = piece[whole:]
        if piece.device.type == "cpu":
            crc = zlib.crc32(piece.numpy().data, crc)
        else:
            elsewhere.setdefault(piece.device, []).append(piece)
    for short in elsewhere.values():
        crc = zlib.crc32(torch.cat(short).cpu().numpy().data, crc)
    return ((value * _MULTIPLIER + crc) & _MASK) or 1


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the digest of whole tensors, in their logical order."""
    return digest(map(as_bytes, tensors))


def _add(value: int, raw: torch.Tensor) -> int:
    """Append bytes to the digest `value`. Their number must be divisible by 4."""
    if raw.storage_offset() % 4:
        raw = raw.clone()  # words have to be aligned
    for total in _row_sums(raw.view(torch.int32)):
        value = (value * _MULTIPLIER + total) & _MASK
    return value


def _row_sums(words: torch.Tensor) -> Iterator[int]:
    weights = _weights(words.device)
    whole = words.numel() // _ROW_WORDS * _ROW_WORDS
    rows = words[:whole].view(-1, _ROW_WORDS)
    if words.device.type == "cpu":
        room = _room()
        for some in torch.split(rows, _ROWS):
            widened = room[: len(some)]
            widened.copy_(some)
            yield from torch.mv(widened, weights).tolist()
    else:
        yield from (rows.long() * weights).sum(dim=1).tolist()
    rest = words[whole:].long()
    yield int((rest * weights[: rest.numel()]).sum())


@functools.cache
def _room() -> torch.Tensor:
    return torch.empty(_ROWS, _ROW_WORDS, dtype=torch.int64)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, equal in every process: the finalizer of splitmix64 of 1, 2, 3, ..."""
    x = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(_MULTIPLIER)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
