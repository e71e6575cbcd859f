"""For a moment, orphans of this process's children become its own children. For workers that a fork server makes:
fork_server.py.

Only for a moment, because whoever adopts has to reap, and nobody could do that safely: what a worker has put into a
session of its own looks like a child that some other part of this process (subprocess, asyncio) waits for, and who is
reaped by another has lost its exit code. So orphans go where they always go, unless a worker is just being made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_REAP_S = 2.0
_LOOK_S = 0.01

_lock = threading.Lock()
_users = 0
_was_on = False  # somebody else has asked for it, for the whole process


def can_adopt_orphans() -> bool:
    """Whether the system can do that."""
    return _is_on() is not None


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Orphans come to this process meanwhile, from all its threads' children. May overlap with itself."""
    global _users, _was_on
    with _lock:
        if _users == 0:
            _was_on = bool(_is_on())
            _control(_PR_SET_CHILD_SUBREAPER, 1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and not _was_on:
                _control(_PR_SET_CHILD_SUBREAPER, 0)


async def reap_group(pgid: int) -> None:
    """Reap what is left of a group whose leader has been reaped and which was killed: its loader processes may have
    become children of this process. Costs one call when there is nothing. Gives up on those that will not end."""
    for _ in range(int(_REAP_S / _LOOK_S)):
        try:
            while os.waitpid(-pgid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(_LOOK_S)


def _is_on() -> bool | None:
    """None where there is no such thing."""
    if sys.platform != "linux":
        return None
    import ctypes

    value = ctypes.c_int()
    return bool(value.value) if _control(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(value)) else None


def _control(option: int, argument: int) -> bool:
    """prctl(2). Whether it worked."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(option, ctypes.c_ulong(argument), *[ctypes.c_ulong(0)] * 3) == 0)
