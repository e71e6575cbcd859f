"""Memory that one process writes and others of the same host read. The pages and tensors of this package are in it.

A segment has no name in any file system, so nothing is left behind however a process ends, and the size of
/dev/shm does not matter. Whoever shall read it is told where it is, and opens it through /proc, for reading only:
a process that was stopped, and thaws when the others have gone on without it, can spoil nothing but its own.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from typing import NamedTuple

_LAYOUT = struct.Struct("=5Q")

PLACE_BYTES = _LAYOUT.size


class Place(NamedTuple):
    """Where a segment is, for other processes of this host.

    device, inode  of the memory, so that a descriptor used anew is not taken for it
    nbytes         its length
    """

    process: int
    descriptor: int
    device: int
    inode: int
    nbytes: int

    def pack(self) -> bytes:
        return _LAYOUT.pack(*self)

    @staticmethod
    def unpack(packed: bytes | memoryview) -> Place:
        return Place(*_LAYOUT.unpack(packed))


def create_segment(nbytes: int) -> tuple[mmap.mmap, Place]:
    """`nbytes` bytes, at least 1, all zero and reserved, so that later writes cannot fail; and what others open them
    by, for as long as the mmap lives. Raises OSError when there is not so much memory."""
    # Closed at exec. A forked child keeps it until it ends, which harms nobody: it is no connection.
    descriptor = os.memfd_create("farandole")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        status = os.fstat(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor).atexit = False
    return memory, Place(os.getpid(), descriptor, status.st_dev, status.st_ino, nbytes)


def open_segment(place: Place) -> mmap.mmap:
    """The memory of another process's segment, read-only. Raises OSError when it is not there any more, or not for
    us: another user's, or in another namespace of process ids."""
    descriptor = os.open(f"/proc/{place.process}/fd/{place.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (place.device, place.inode) or status.st_size < place.nbytes:
            raise FileNotFoundError(f"process {place.process} has another file in the place of its segment")
        return mmap.mmap(descriptor, place.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
