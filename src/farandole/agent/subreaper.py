"""Temporary adoption of orphans: for a moment, orphans of this process's children become its own children. For workers
that a fork server forks: fork_server.py.

Only for a moment, because the adopting process has to reap, which is not safe: a process that a worker has put into its
own session looks like a child that another part of this process (subprocess, asyncio) waits for, and the exit code of a
child is lost when another part reaps it. So orphans go to their usual parent, unless a worker is just being forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h; man 2 PR_SET_CHILD_SUBREAPER
_REAP_S = 2.0
_LOOK_S = 0.01

_lock = threading.Lock()
_users = 0
_was_on = False  # other code has enabled it, for the whole process


def can_adopt_orphans() -> bool:
    """Return whether the system supports it."""
    return _is_on() is not None


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt the orphans of all threads' children inside the block. May overlap with itself."""
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
    """Reap the rest of a group whose leader has been reaped and which was killed: its loader processes may have become
    children of this process. Costs one call when there is none. Gives up on processes that do not end."""
    for _ in range(int(_REAP_S / _LOOK_S)):
        try:
            while os.waitpid(-pgid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(_LOOK_S)


def _is_on() -> bool | None:
    """Return whether it is enabled; None where the system does not support it."""
    if sys.platform != "linux":
        return None
    import ctypes

    value = ctypes.c_int()
    return bool(value.value) if _control(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(value)) else None


def _control(option: int, argument: int) -> bool:
    """Call prctl(2) and return whether it succeeded."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return bool(prctl(option, ctypes.c_ulong(argument), *[ctypes.c_ulong(0)] * 3) == 0)
