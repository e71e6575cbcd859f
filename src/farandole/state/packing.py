"""Any Python value as bytes plus tensors, which stay out of the pickle and travel as raw memory; and their transfer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.collectives.connection_pair import bytes_of
from farandole.collectives.transport import Transport


@dataclass(frozen=True)
class Packed:
    """A packed value. `skeleton` holds all but the tensors, to which it refers by their places in `tensors`."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def pack(value: Any) -> Packed:
    """Divide a value into bytes and tensors. The tensors are the value's own, not copies; they may be nested in any
    picklable structure.

    Raises the errors of pickle for values that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return Packed(file.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> Any:
    """Return the value again, with `packed.tensors` in it (not copies). Only for bytes from an authenticated peer."""
    return _Unpickler(io.BytesIO(packed.skeleton), packed.tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []

    # Instead of persistent_id(), which is called for every number and string, too: a state is packed in each step.
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        self.tensors.append(obj)
        # Shape and dtype in the skeleton let the receiver allocate memory before the first byte of data arrives.
        return _tensor, (len(self.tensors) - 1, tuple(obj.shape), str(obj.dtype).removeprefix("torch."))


def _tensor(place: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    raise AssertionError("only unpack() and make_room() read a skeleton")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor] | None) -> None:
        super().__init__(file)
        self.tensors = tensors if tensors is not None else []
        self._makes_room = tensors is None

    def find_class(self, module: str, name: str) -> Any:
        return self._tensor if (module, name) == (__name__, _tensor.__name__) else super().find_class(module, name)

    def _tensor(self, place: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if self._makes_room and place == len(self.tensors):
            self.tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
        return self.tensors[place]


def make_room(skeleton: bytes) -> tuple[Any, list[torch.Tensor]]:
    """Return the value with uninitialized tensors in it, and these tensors in the order of `Packed.tensors`. Filling
    them completes the value. Only for bytes from an authenticated peer."""
    unpickler = _Unpickler(io.BytesIO(skeleton), None)
    return unpickler.load(), unpickler.tensors


# The transfer of tensors through a transport, in pieces of a fixed size -----------------------------------------------

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
            raw = bytes_of(self._tensors[self._index])
            count = min(raw.numel() - self._offset, piece.numel() - done)
            if count:
                yield raw[self._offset : self._offset + count], piece[done : done + count]
            done += count
            self._offset += count
            if self._offset == raw.numel():
                self._index, self._offset = self._index + 1, 0
