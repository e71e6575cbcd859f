"""Any Python value as bytes plus tensors: tensors stay out of the pickle, so that they travel as raw memory."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Packed:
    """`skeleton` holds everything but the tensors, which it refers to by their place in `tensors`."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def pack(value: Any) -> Packed:
    """Take a value apart. The tensors are the value's own, not copies; nested in any picklable structure.

    Raises what pickle raises for values that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return Packed(file.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> Any:
    """The value again, with `packed.tensors` in it (not copies). Only for bytes from an authenticated peer."""
    return _Unpickler(io.BytesIO(packed.skeleton), packed.tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []

    # Not persistent_id(), which is asked for every number and string, too: a state is packed in each step.
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        self.tensors.append(obj)
        # Shape and dtype in the skeleton let the receiver make room before the first byte of data arrives.
        return _tensor, (len(self.tensors) - 1, tuple(obj.shape), str(obj.dtype).removeprefix("torch."))


def _tensor(place: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    raise AssertionError("a skeleton is read by unpack() and make_room() only")


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
    """The value with uninitialized tensors in it, and these tensors in the order of `Packed.tensors`:
    fill them, and the value is complete. Only for bytes from an authenticated peer."""
    unpickler = _Unpickler(io.BytesIO(skeleton), None)
    return unpickler.load(), unpickler.tensors
