"""Tensors that other processes of the host can read in place, the memory behind them, and references to them.

Gradient buckets are made here. A collective moves such a tensor without a copy. In all other respects it is like any
other tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Below this size a segment of its own costs more than the copies that it saves.
_LEAST_BYTES = 64 * 1024

# More than the buckets and staging areas of all ranks of a host. Unused entries are evicted in time.
_MOST_OPENED = 64

_CPU = torch.device("cpu")

_segment_refs: dict[int, SegmentRef] = {}
"""The segments that were made here and are alive, by the address of their storage."""

_reserved: dict[int, torch.Tensor] = {}
"""The memory that was created ahead of time, by its number of bytes."""


def can_share_memory() -> bool:
    """Return whether this is Linux on x86-64.

    Elsewhere the number of the system call futex(2) differs, and most processors may reorder stores, so that a counter
    would announce data that is not visible yet.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64"


def shareable_zeros(numel: int, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Return a flat tensor of zeros; on the CPU in shared memory if it is large and the platform supports that."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    if nbytes < _LEAST_BYTES or not can_share_memory():
        return torch.zeros(numel, dtype=dtype, device="cpu")
    try:
        return create_tensor(nbytes).view(dtype)
    except OSError:
        return torch.zeros(numel, dtype=dtype, device="cpu")  # raises the clearest error if there is no memory at all


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
    if nbytes >= _LEAST_BYTES and can_share_memory():
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
        # torch 2.13 warns in torch/csrc/utils/tensor_new.cpp, tensor_frombuffer(): it has no read-only tensors.
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


# Segments: memory that one process writes and others of the same host read --------------------------------------------
#
# A segment has no name in any file system, so nothing is left behind however a process ends, and the size of /dev/shm
# does not matter. Its readers are told its place, and open it through /proc, read-only: a process that was stopped,
# and resumes when the others have gone on without it, can damage only its own data.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class SegmentRef(NamedTuple):
    """The place of a segment, for other processes of this host.

    Attributes:
        device, inode: Those of the memory, so that a reused descriptor is not mistaken for it.
        nbytes: Its length.
    """

    process: int
    descriptor: int
    device: int
    inode: int
    nbytes: int


class OwnSegment(NamedTuple):
    """A segment of this process.

    Attributes:
        memory: The whole segment, readable and writable; mapped while an object refers to it.
        ref: The reference by which others open it, while `memory` lives and until it is hidden.
        hide: Closes the descriptor by which others open the segment, after all of them have opened it. Idempotent.
    """

    memory: memoryview
    ref: SegmentRef
    hide: Callable[[], object]


def create_segment(nbytes: int) -> OwnSegment:
    """Return a new segment of `nbytes` bytes, at least 1, all zero and reserved, so that later writes cannot fail.

    Raises OSError when there is not enough memory, or no descriptor left.
    """
    # Closed at exec. A forked child keeps it until it ends, which does no harm: it is not a connection.
    descriptor = os.memfd_create("farandole")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        mapped = _map(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        status = os.fstat(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    hide = weakref.finalize(mapped, os.close, descriptor)
    hide.atexit = False
    ref = SegmentRef(os.getpid(), descriptor, status.st_dev, status.st_ino, nbytes)
    return OwnSegment(memoryview(mapped), ref, hide)  # type: ignore[arg-type]


def open_segment(ref: SegmentRef) -> memoryview:
    """Return the memory of another process's segment, read-only.

    Raises OSError when it does not exist any more, or is not accessible: another user's, or in another namespace of
    process ids.
    """
    # Opening this link gives the file itself, although it has no name: man 5 proc_pid_fd, man 2 memfd_create.
    descriptor = os.open(f"/proc/{ref.process}/fd/{ref.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (ref.device, ref.inode) or status.st_size < ref.nbytes:
            raise FileNotFoundError(
                f"descriptor {ref.descriptor} of process {ref.process} is no longer its shared memory segment"
            )
        mapped = _map(descriptor, ref.nbytes, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return memoryview(mapped).toreadonly()  # type: ignore[arg-type]


def _map(descriptor: int, nbytes: int, protection: int) -> npt.NDArray[np.uint8]:
    """Call mmap(2) through the C library.

    Python's mmap keeps a descriptor of its own for each mapping (until 3.13, which has trackfd=False), which would make
    that two for each rank of the host, and four in a regroup.
    """
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return np.ctypeslib.as_array(memory)


# References to the memory of this rank in an operation: its tensor itself, or a staging area --------------------------
#
# A tensor in private memory is copied into the staging area, piece by piece. The area has two halves that alternate,
# from one operation to the next, too: one is filled while others may still read the other one.

_WHOLE = 2
_NO_SEGMENT = SegmentRef(0, 0, 0, 0, 0)

_PACKED = struct.Struct("=7Q")  # the segment, offset and first_half

TENSOR_REF_BYTES = _PACKED.size


class TensorRef(NamedTuple):
    """The place of a tensor, or of a staging area, in a segment.

    Attributes:
        offset: That of the tensor in its segment, in bytes; 0 for a staging area.
        first_half: The first half of the staging area; _WHOLE if the tensor itself is there, whole.
    """

    segment: SegmentRef
    offset: int
    first_half: int

    @property
    def is_staged(self) -> bool:
        return self.first_half != _WHOLE

    def pack(self) -> bytes:
        return _PACKED.pack(*self.segment, self.offset, self.first_half)

    @staticmethod
    def unpack(packed: memoryview) -> TensorRef:
        *segment, offset, first_half = _PACKED.unpack(packed[:TENSOR_REF_BYTES])
        return TensorRef(SegmentRef(*segment), offset, first_half)

    def bytes_of(self, piece: int, start: int, stop: int, piece_bytes: int) -> slice:
        """Return the place in the segment of piece number `piece`: bytes [start, stop) of the tensor."""
        begin = (self.first_half + piece) % 2 * piece_bytes if self.is_staged else self.offset + start
        return slice(begin, begin + stop - start)


class Stage:
    """The staging area of this rank, for pieces of up to `piece_bytes`; made when first needed. For one thread."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._area: torch.Tensor | None = None
        self._filled = 0  # the number of pieces, in all operations

    def make_ref(self, flat: torch.Tensor, is_read: bool = True) -> TensorRef:
        """Return the reference to a contiguous tensor, which no rank needs to read unless `is_read`.

        Raises OSError when there is no memory for a staging area.
        """
        where = find_segment(flat) if is_read else (_NO_SEGMENT, 0)
        if where is not None:
            return TensorRef(*where, _WHOLE)
        if self._area is None:
            self._area = create_tensor(2 * self._piece_bytes)
        area = find_segment(self._area)
        assert area is not None
        return TensorRef(*area, self._filled % 2)

    def put(self, tensor_ref: TensorRef, piece: torch.Tensor) -> torch.Tensor:
        """Make the next piece of the tensor readable for others.

        Returns that memory, which is the piece's own if the tensor is there whole.
        """
        if not tensor_ref.is_staged:
            return piece
        assert self._area is not None
        begin = self._filled % 2 * self._piece_bytes
        half = self._area[begin : begin + piece.nbytes].view(piece.dtype)
        half.copy_(piece)
        self._filled += 1
        return half

    def close(self) -> None:
        self._area = None
