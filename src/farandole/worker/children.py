"""Termination of loader processes that ignore SIGTERM and would keep their worker from ending. Called by context.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import cache
from multiprocessing.util import Finalize

from farandole.clock import now_s

PATIENCE_S = 2.0
"""Seconds from SIGTERM to SIGKILL, for all of them together."""


@cache
def end_stubborn_at_exit() -> None:
    """End daemonic children when this process ends, whatever they do about SIGTERM.

    multiprocessing sends SIGTERM to them at the exit, and then waits without limit. (torch's loader processes are such
    children; they run the user's code.) Meanwhile the worker's job does not end. Idempotent.
    """
    # The first step at the exit: torch has declared by then that its loaders' deaths are not errors.
    Finalize(None, _end_stubborn, args=(os.getpid(),), exitpriority=0)


def _end_stubborn(owner: int) -> None:
    if os.getpid() != owner:
        return
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline_s = now_s() + PATIENCE_S
    for child in children:
        child.join(max(0.0, deadline_s - now_s()))
    stubborn = [child for child in children if child.exitcode is None]
    if stubborn:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch takes the end of a loader process by SIGKILL for an error
    for child in stubborn:
        child.kill()
