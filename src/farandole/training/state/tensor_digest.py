"""A 64-bit digest of tensors, which tells copies of one state apart at memory speed; not for security.

Long pieces are hashed multilinearly: each 32-bit word is multiplied by a random odd 64-bit number that belongs to its
place, and the products are added up modulo 2^64; the sums of rows of words are the coefficients of a polynomial (D.
Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014). Shorter pieces go through CRC-32: in a step,
where neither torch's operations nor their operands are in the caches, the sums take 0.3 ms more. A change of a single
word always changes the digest. Any other change, such as swapped values or signs, changes it except with a probability
of about 2^-32.

Words of 64 bits would be three times as fast, and would miss every pair of changed signs of float64: their highest bits
cancel modulo 2^64.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import torch

from farandole.training.collectives.connection_pair import bytes_of

_ROW_WORDS = 8192
_ROWS = 4  # at once: their products stay in the cache
LONG_BYTES = 1 << 19
"""Pieces that are shorter are hashed by CRC-32."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


Piece: TypeAlias = torch.Tensor | memoryview
"""A 1-D uint8 tensor of any length on any device, or its memory, if that is shorter than LONG_BYTES."""


def digest(pieces: Iterable[Piece]) -> int:
    """Return the digest of the pieces, which depends on bytes and lengths alone; never 0, which stands for none."""
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
    return digest(bytes_of(tensor) for tensor in tensors)


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
    return torch.empty(_ROWS, _ROW_WORDS, dtype=torch.int64, device="cpu")


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, equal in every process: the finalizer of splitmix64 of 1, 2, 3, ..."""
    x = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(_MULTIPLIER)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
