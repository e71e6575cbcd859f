"""Transfer a list of tensors through a transport in pieces of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from farandole.collectives.transport import Transport

PIECE_BYTES = 4 << 20


def broadcast_all(transport: Transport, tensors: Sequence[torch.Tensor] | None, total_bytes: int, source: int) -> None:
    """Overwrite `tensors` with rank `source`'s; all ranks call it with the same `total_bytes`.

    A rank that needs no data passes None: it forwards the pieces and drops them. On all other ranks the tensors have
    the same shapes and dtypes as the source's, in the same order, on the CPU.
    """
    piece = torch.empty(min(PIECE_BYTES, total_bytes), dtype=torch.uint8)
    cursor = _Cursor(tensors) if tensors is not None else None
    for start in range(0, total_bytes, PIECE_BYTES):
        part = piece[: min(PIECE_BYTES, total_bytes - start)]
        if transport.rank == source and cursor is not None:
            cursor.copy_to(part)
        transport.broadcast(part, source)
        if transport.rank != source and cursor is not None:
            cursor.copy_from(part)


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a CPU tensor as a 1-D uint8 tensor; shares it when contiguous, copies it when not."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Cursor:
    """Iterates over the bytes of several tensors as if they were one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._index = 0
        self._offset = 0

    def copy_to(self, piece: torch.Tensor) -> None:
        for raw, part in self._walk(piece):
            part.copy_(raw)

    def copy_from(self, piece: torch.Tensor) -> None:
        for raw, part in self._walk(piece):
            raw.copy_(part)

    def _walk(self, piece: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of equally long views, (part of a tensor, part of the piece), until the end of the piece."""
        done = 0
        while done < piece.numel():
            raw = as_bytes(self._tensors[self._index])
            count = min(raw.numel() - self._offset, piece.numel() - done)
            if count:
                yield raw[self._offset : self._offset + count], piece[done : done + count]
            done += count
            self._offset += count
            if self._offset == raw.numel():
                self._index, self._offset = self._index + 1, 0
