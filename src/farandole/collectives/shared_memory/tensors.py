"""Tensors that other processes of the host can read in place. Gradient buckets are made here.

A collective moves such a tensor without a copy. In all other respects it is like any other tensor.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref

import torch

from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.segment import SegmentRef, create_segment, open_segment

# Below this size a segment of its own costs more than the copies that it saves.
_LEAST_BYTES = 64 * 1024

# More than the buckets and staging areas of all ranks of a host. Unused entries are evicted in time.
_MOST_OPENED = 64

_segment_refs: dict[int, SegmentRef] = {}
"""The segments that were made here and are alive, by the address of their storage."""


_CPU = torch.device("cpu")

_reserved: dict[int, torch.Tensor] = {}
"""The memory that was created ahead of time, by its number of bytes."""


def shareable_zeros(numel: int, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Return a flat tensor of zeros; on the CPU in shared memory if it is large and the platform supports that."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    if nbytes < _LEAST_BYTES or not futex.is_supported():
        return torch.zeros(numel, dtype=dtype)
    try:
        return create_tensor(nbytes).view(dtype)
    except OSError:
        return torch.zeros(numel, dtype=dtype)  # raises the clearest error if there is no memory at all


def create_tensor(nbytes: int) -> torch.Tensor:
    """Return bytes in shared memory, all zero. Raises OSError when there is not enough of it."""
    reserved = _reserved.pop(nbytes, None)
    if reserved is not None:
        return reserved
    memory, ref, _ = create_segment(nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    _segment_refs[address] = ref
    # The finalizer is that of the array, which is freed before its memory is unmapped. That of a memoryview runs only
    # after, when another thread may have been given the same address.
    weakref.finalize(memory.obj, _segment_refs.pop, address, None).atexit = False
    return tensor


def reserve_zeros(numel: int, dtype: torch.dtype) -> None:
    """Create and map now the memory of one later call of shareable_zeros(), on the CPU. Does nothing if it is small."""
    nbytes = numel * dtype.itemsize
    if nbytes >= _LEAST_BYTES and futex.is_supported():
        with contextlib.suppress(OSError):  # raised when it is needed
            _reserved[nbytes] = create_tensor(nbytes).zero_()


def find_segment(flat: torch.Tensor) -> tuple[SegmentRef, int] | None:
    """Return the segment of a contiguous tensor, and its first byte there; None if others cannot read it."""
    address = flat.untyped_storage().data_ptr()
    ref = _segment_refs.get(address)
    return None if ref is None else (ref, flat.data_ptr() - address)


def readable(memory: memoryview) -> torch.Tensor:
    """Return a whole segment of another process, as bytes. Writing into it ends this process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


class OtherTensors:
    """The memory of other ranks, opened when it is first needed, until close()."""

    def __init__(self) -> None:
        self._opened: dict[tuple[int, int], torch.Tensor] = {}

    def find(self, ref: SegmentRef) -> torch.Tensor:
        """Return the whole segment, as bytes, read-only. Raises OSError when it does not exist any more."""
        key = ref.device, ref.inode
        whole = self._opened.get(key)
        if whole is None:
            if len(self._opened) == _MOST_OPENED:
                del self._opened[next(iter(self._opened))]
            whole = self._opened[key] = readable(open_segment(ref))
        return whole

    def close(self) -> None:
        self._opened.clear()
