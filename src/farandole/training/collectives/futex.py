"""Sleep until a word of shared memory changes, and wake sleepers: Linux's futex(2), through the C library."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable

_SYSCALL = 202  # on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, until futex_wake() or for `timeout_s`. May return early.

    Releases the interpreter's lock. Raises OSError for an address that is not mapped.
    """
    whole = int(timeout_s)
    limit = _TimeSpec(whole, int((timeout_s - whole) * 1e9))
    if _syscall()(_SYSCALL, address, _WAIT, value, ctypes.byref(limit), None, 0) == -1:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, os.strerror(number))


def futex_wake(address: int) -> None:
    """Wake all threads, in all processes, that sleep on the word at `address`."""
    _syscall()(_SYSCALL, address, _WAKE, _EVERYBODY, None, None, 0)


@functools.cache
def _syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
    ]
    return call
