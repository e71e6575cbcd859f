"""Any Python value as bytes plus tensors, which stay out of the pickle and travel as raw memory; and their transfer."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.collectives.transport import Transport


@dataclass(frozen=True)
class Packed:
    """A packed value. `skeleton` holds all but the values of the tensors, to which it refers by their places in
    `tensors`; it begins with their shapes and dtypes."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def pack(value: Any) -> Packed:
    """Divide a value into bytes and tensors: its own, not copies, nested in any structure that can be pickled. Raises
    the errors of pickle for other values."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    forms = pickle.dumps([(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in pickler.tensors])
    return Packed(_LENGTH.pack(len(forms)) + forms + file.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> Any:
    """Return the value again, with `packed.tensors` in it (not copies). Only for bytes from an authenticated peer."""
    file = io.BytesIO(packed.skeleton)
    _read_forms(file)
    return _Unpickler(file, packed.tensors).load()


def make_room(skeleton: bytes) -> list[torch.Tensor]:
    """Return uninitialized tensors for `Packed.tensors`. The value can be unpacked once they are filled, not before:
    what it is made of may read them. Only for bytes from an authenticated peer."""
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        for shape, dtype in _read_forms(io.BytesIO(skeleton))
    ]


def _read_forms(file: io.BytesIO) -> list[tuple[tuple[int, ...], str]]:
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    forms: list[tuple[tuple[int, ...], str]] = pickle.loads(file.read(length))
    return forms


_LENGTH = struct.Struct("<Q")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []

    # Instead of persistent_id(), which is called for every number and string, too: a state is packed in each step.
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            if type(obj).__name__ == "DTensor":  # importing it takes half a second
                raise TypeError("a tensor that is divided among the workers, as by fully_shard(), has no value alone")
            return NotImplemented
        self.tensors.append(obj)
        return _tensor, (len(self.tensors) - 1,)


def _tensor(place: int) -> torch.Tensor:
    raise AssertionError("only unpack() reads a skeleton")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        is_ours = (module, name) == (__name__, _tensor.__name__)
        return self._tensors.__getitem__ if is_ours else super().find_class(module, name)


# The transfer of tensors through a transport, in pieces of a fixed size -----------------------------------------------

PIECE_BYTES = 4 << 20


def broadcast_all(transport: Transport, tensors: Sequence[torch.Tensor] | None, total_bytes: int, source: int) -> None:
    """Overwrite `tensors` with rank `source`'s; all ranks call it with the same `total_bytes`.

    A rank that needs no data passes None: it forwards the pieces and drops them. On all other ranks the tensors have
    the same shapes and dtypes as the source's, in the same order, on the CPU.
    """
    piece = torch.empty(min(PIECE_BYTES, total_bytes), dtype=torch.uint8, device="cpu")
    pieces = _in_pieces(tensors) if tensors is not None else None
    for start in range(0, total_bytes, PIECE_BYTES):
        part = piece[: min(PIECE_BYTES, total_bytes - start)]
        views = next(pieces) if pieces is not None else []
        parts = torch.split(part, [each.numel() for each in views]) if views else ()
        if transport.rank == source:
            for view, each in zip(views, parts, strict=True):
                each.copy_(view)  # the source's tensors may be on a device
        transport.broadcast(part, source)
        if transport.rank != source:
            for view, each in zip(views, parts, strict=True):
                view.copy_(each)


def _in_pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the bytes of several tensors as if they were one: the views that make up one piece after the other."""
    views, room = list[torch.Tensor](), PIECE_BYTES
    for tensor in tensors:
        raw = bytes_of(tensor)
        while raw.numel():
            views.append(raw[:room])
            raw = raw[room:]
            room -= views[-1].numel()
            if not room:
                yield views
                views, room = [], PIECE_BYTES
    if views:
        yield views


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
