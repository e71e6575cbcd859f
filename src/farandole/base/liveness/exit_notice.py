"""Detect the end of a process before the kernel has freed its memory: a robust mutex in shared memory.

The kernel frees a dead process's memory first and reports its exit afterwards: 20 ms later with 300 MB, 150 ms with
2 GB. But the robust mutexes that a thread holds are marked, and their waiters are woken, when the thread begins to end
(Linux, kernel/exit.c, do_exit(): exit_mm() before exit_notify(); Documentation/locking/robust-futexes.rst).
liveness/status_reporting.py has the main thread of a worker lock one; agent/worker_server.py waits for all of them.

It is a hint: the mark says that a thread ends, not that its process does. Linux on x86-64 with glibc; elsewhere no
thread holds a mutex, and there are no notices.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
from collections.abc import Callable, Sequence

from farandole.base.machine import now_s

MOST_WORDS = 127
"""The largest number of mutexes for wait(): Linux's limit, less one for the word that interrupts it."""

_FUTEX, _FUTEX_WAITV = 202, 449  # on x86-64; man 2 futex, Documentation/userspace-api/futex2.rst
_WAKE = 1
_EVERYBODY = 2**31 - 1
_SIZE_32 = 2
_HAS_WAITERS, _OWNER_DIED = 1 << 31, 1 << 30
_PROCESS_SHARED, _ROBUST = 1, 1
_ATTRIBUTE_BYTES = 64  # more than any glibc's pthread_mutexattr_t
_EXITING = 0x4  # PF_EXITING of the kernel's task flags: include/linux/sched.h
_FLAGS = 6  # of /proc/PID/stat (man 5 proc_pid_stat), counted from the state


@functools.cache
def is_supported() -> bool:
    """Return whether this system has all required features: futex_waitv came with Linux 5.16."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    _syscall()(_FUTEX_WAITV, None, 0, 0, None, 0)  # without words: ENOSYS, or a sandbox's EPERM, where it is missing
    return ctypes.get_errno() == errno.EINVAL


def lock(memory: mmap.mmap, offset: int) -> None:
    """Lock a mutex at this place of shared memory for the life of the calling thread. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
    mutex = ctypes.c_void_p(address)
    for call, arguments in (
        (library.pthread_mutexattr_init, (attributes,)),
        (library.pthread_mutexattr_setpshared, (attributes, _PROCESS_SHARED)),
        (library.pthread_mutexattr_setrobust, (attributes, _ROBUST)),
        (library.pthread_mutex_init, (mutex, attributes)),
        (library.pthread_mutex_lock, (mutex,)),
    ):
        number = call(*arguments)
        if number:
            raise OSError(number, os.strerror(number))
    # The kernel's list of a thread's mutexes, which it reads when the thread ends, is in this memory: it is never
    # freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    # The kernel wakes only if the word says that there are waiters (kernel/futex/core.c, handle_futex_death()); usually
    # a waiter sets that. Only this thread, and the kernel when it ends, ever store into this word: no atomic exchange
    # is needed.
    word = ctypes.c_uint32.from_address(address)
    word.value |= _HAS_WAITERS
    _syscall()(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


def is_marked(word: int) -> bool:
    """Return whether the first 32 bits of a mutex say that the thread which held it is ending."""
    return bool(word & _OWNER_DIED)


def is_main_thread_ending(pid: int) -> bool:
    """Return whether the main thread of a process has begun to end, or is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return True
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may contain any character
    return bool(int(fields[_FLAGS]) & _EXITING) or fields[0] == b"Z"


def wait(words: Sequence[tuple[int, int]], timeout_s: float) -> None:
    """Sleep until one of these (address, value) has another value and its waiters are woken, or for `timeout_s`. May
    return early. Releases the interpreter's lock. At most MOST_WORDS + 1 words."""
    waiters = (_Waiter * len(words))(*[_Waiter(value, address, _SIZE_32, 0) for address, value in words])
    until_s = now_s() + timeout_s
    limit = _TimeSpec(int(until_s), int(until_s % 1 * 1e9))
    _syscall()(_FUTEX_WAITV, waiters, len(words), 0, ctypes.byref(limit), _CLOCK_MONOTONIC)


def wake(address: int) -> None:
    """Wake the waiters for the word at this address. Call it when the word has changed."""
    _syscall()(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


_CLOCK_MONOTONIC = 1


@functools.cache
def _syscall() -> Callable[..., int]:
    library = ctypes.CDLL(None, use_errno=True)
    call = library.syscall
    call.restype = ctypes.c_long

    def with_whole_words(number: int, *arguments: object) -> int:
        # Integers are passed as C's long: ctypes would truncate addresses to an int.
        whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        return int(call(ctypes.c_long(number), *whole))

    return with_whole_words
