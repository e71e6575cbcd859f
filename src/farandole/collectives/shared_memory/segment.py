"""Memory that one process writes and others of the same host read, for control blocks and tensors.

A segment has no name in any file system, so nothing is left behind however a process ends, and the size of /dev/shm
does not matter. Its readers are told its place, and open it through /proc, read-only: a process that was stopped, and
resumes when the others have gone on without it, can damage only its own data.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_LAYOUT = struct.Struct("=5Q")

SEGMENT_REF_BYTES = _LAYOUT.size


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

    def pack(self) -> bytes:
        return _LAYOUT.pack(*self)

    @staticmethod
    def unpack(packed: bytes | memoryview) -> SegmentRef:
        return SegmentRef(*_LAYOUT.unpack(packed))


class OwnSegment(NamedTuple):
    """A segment of this process.

    Attributes:
        memory: The whole segment, readable and writable; mapped while an object refers to it.
        place: The reference by which others open it, while `memory` lives and until it is hidden.
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
    descriptor = os.open(f"/proc/{ref.process}/fd/{ref.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (ref.device, ref.inode) or status.st_size < ref.nbytes:
            raise FileNotFoundError(f"process {ref.process} has another file in the place of its segment")
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


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
