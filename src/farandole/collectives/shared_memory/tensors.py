"""Tensors that other processes of the host can read where they are. Gradient buckets are made here.

A collective moves such a tensor without a copy. Everything else about it is as with any other tensor.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref

import torch

from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.segment import SegmentRef, create_segment, open_segment

# Below this a segment of its own costs more than the copies that it saves.
_LEAST_BYTES = 64 * 1024

# More than the buckets and staging areas of all ranks of a host. What nobody needs any more goes in time.
_MOST_OPENED = 64

_segment_refs: dict[int, SegmentRef] = {}
"""By the address of a storage: all that were made here and are alive."""


_CPU = torch.device("cpu")

_reserved: dict[int, torch.Tensor] = {}
"""By the number of its bytes: what was made ahead of time."""


def shareable_zeros(numel: int, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Flat; on the CPU in shared memory if it is large and the platform has that, else anywhere."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    if nbytes < _LEAST_BYTES or not futex.is_supported():
        return torch.zeros(numel, dtype=dtype)
    try:
        return create_tensor(nbytes).view(dtype)
    except OSError:
        return torch.zeros(numel, dtype=dtype)  # says it best if there is no memory at all


def create_tensor(nbytes: int) -> torch.Tensor:
    """Bytes in shared memory, all zero. Raises OSError when there is not so much of it."""
    reserved = _reserved.pop(nbytes, None)
    if reserved is not None:
        return reserved
    memory, ref, _ = create_segment(nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    _segment_refs[address] = ref
    # Of the array, which is freed before its memory is unmapped. A memoryview tells of its end only behind that, when
    # another thread may have been given the same address.
    weakref.finalize(memory.obj, _segment_refs.pop, address, None).atexit = False
    return tensor


def reserve_zeros(numel: int, dtype: torch.dtype) -> None:
    """Make now, and map, what shareable_zeros() is going to be asked for, once: on the CPU. Nothing if it is small."""
    nbytes = numel * dtype.itemsize
    if nbytes >= _LEAST_BYTES and futex.is_supported():
        with contextlib.suppress(OSError):  # said when it is needed
            _reserved[nbytes] = create_tensor(nbytes).zero_()


def find_segment(flat: torch.Tensor) -> tuple[SegmentRef, int] | None:
    """The segment that a contiguous tensor is in, and at which byte; None if others cannot read it."""
    address = flat.untyped_storage().data_ptr()
    ref = _segment_refs.get(address)
    return None if ref is None else (ref, flat.data_ptr() - address)


def readable(memory: memoryview) -> torch.Tensor:
    """A whole segment of another process, as bytes. Writing into it ends this process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


class OtherTensors:
    """The memory of other ranks, opened when it is first needed, until close()."""

    def __init__(self) -> None:
        self._opened: dict[tuple[int, int], torch.Tensor] = {}

    def find(self, ref: SegmentRef) -> torch.Tensor:
        """The whole segment, as bytes, to be read only. Raises OSError when it is not there any more."""
        key = ref.device, ref.inode
        whole = self._opened.get(key)
        if whole is None:
            if len(self._opened) == _MOST_OPENED:
                del self._opened[next(iter(self._opened))]
            whole = self._opened[key] = readable(open_segment(ref))
        return whole

    def close(self) -> None:
        self._opened.clear()
