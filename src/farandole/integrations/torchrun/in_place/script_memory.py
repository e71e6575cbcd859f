"""Values whose bytes a script changes in place, and that are no tensors: arrays of NumPy and of Python, C's data, files
in memory.

Arrays of NumPy are looked at as tensors of the same memory. Of the others, which are small, all bytes are remembered.
"""

from __future__ import annotations

import array
import ctypes
import io
import pickle
import sys
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

LARGE_BYTES = 1 << 20
"""A larger array of Python, or file, is kept at each boundary only where it has been seen to change."""

_MOST_BYTES = 64 << 20  # of one that is looked at
_FILES: Any = (io.BytesIO, io.StringIO)
_KINDS_OF_NUMBERS = "?bBhHiIlLqQfdg"  # codes of ctypes' types without pointers


def is_memory(value: object) -> bool:
    """Return whether a value has bytes that read() and write() know."""
    if isinstance(value, bytearray | array.array):
        return size_of(value) <= _MOST_BYTES
    if isinstance(value, _FILES):
        return not value.closed and size_of(value) <= _MOST_BYTES
    return isinstance(value, ctypes._SimpleCData | ctypes.Array) and _has_numbers(type(value))


def size_of(value: Any) -> int:
    """Return the number of bytes of such a value, or of characters of a file of text."""
    if isinstance(value, _FILES):
        return len(value.getvalue())
    return len(memoryview(value).cast("B")) if isinstance(value, bytearray | array.array) else ctypes.sizeof(value)


def shared_data(value: Any) -> Any:
    """Return the data of a multiprocessing.Value or Array, which a lock guards; every other value as it is."""
    shared = sys.modules.get("multiprocessing.sharedctypes")
    return value.get_obj() if shared is not None and isinstance(value, shared.SynchronizedBase) else value


def read_memory(value: Any) -> bytes:
    if isinstance(value, _FILES):
        return pickle.dumps(value.__getstate__()[:-1])  # but for its attributes
    return bytes(memoryview(value).cast("B")) if isinstance(value, bytearray | array.array) else bytes(value)


def write_memory(value: Any, data: bytes) -> None:
    """Give a value the bytes that read_memory() has returned."""
    if isinstance(value, bytearray):
        value[:] = data
    elif isinstance(value, array.array):
        value[:] = array.array(value.typecode, data)
    elif isinstance(value, _FILES):
        value.__setstate__((*pickle.loads(data), None))
    else:
        ctypes.memmove(ctypes.addressof(value), data, len(data))


def read_context(variable: ContextVar[Any]) -> dict[str, Any]:
    """Return the value of a context variable, by an empty name; nothing where it has none."""
    try:
        return {"": variable.get()}
    except LookupError:
        return {}


def as_tensor(value: np.ndarray) -> torch.Tensor | None:
    """Return a tensor of the bytes of an array, in whatever order and form it has them; None for one that cannot be
    written, has no bytes, or refers to objects."""
    if not value.flags.writeable or value.dtype.hasobject or not value.size:
        return None
    tensor = torch.from_numpy(value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else _bytes_of(value))
    tensor._array = value  # type: ignore[attr-defined] # by which it is known again: it is made anew in each search
    return tensor


class _Bytes:
    def __init__(self, array: np.ndarray) -> None:
        place = {"data": (array.ctypes.data, False), "strides": (*array.strides, 1)}
        self.__array_interface__ = {"shape": (*array.shape, array.itemsize), "typestr": "|u1", "version": 3, **place}
        self.array = array  # NumPy keeps this object, and so the memory


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the bytes of each item; torch has no axes that go backwards."""
    return np.asarray(_Bytes(array[tuple(slice(None, None, -1 if step < 0 else 1) for step in array.strides)]))


def is_same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Return whether both are the same tensor, or tensors of the same array."""
    return one is other or getattr(one, "_array", one) is getattr(other, "_array", other)


def _has_numbers(kind: Any) -> bool:
    inner = getattr(kind, "_type_", None)
    return inner in _KINDS_OF_NUMBERS if isinstance(inner, str) else inner is not None and _has_numbers(inner)
