"""Orphans of this process's children become its own children. For workers that a fork server made: fork_server.py."""

from __future__ import annotations

import asyncio
import os
import sys

_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 2.0
_LOOK_S = 0.01


def adopt_orphans() -> bool:
    """From now on. Whether the system can do that."""
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


async def reap_group(pgid: int) -> None:
    """Reap what is left of a group whose leader has been reaped and which was killed: its loader processes have become
    children of this process. Costs one call when there is nothing. Gives up on those that will not end."""
    for _ in range(int(_REAP_S / _LOOK_S)):
        try:
            while os.waitpid(-pgid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(_LOOK_S)
