"""Loader processes that ignore SIGTERM do not keep their worker from ending. context.py asks for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import cache
from multiprocessing.util import Finalize

from farandole.clock import now_s

PATIENCE_S = 2.0
"""From SIGTERM to SIGKILL, for all of them together."""


@cache
def end_stubborn_at_exit() -> None:
    """When this process ends, so do its daemonic children, whatever they do about SIGTERM.

    multiprocessing sends it to them at the exit, and then waits for ever. (torch's loader processes are such children;
    what they run is the user's.) While that lasts the worker's job does not end. Idempotent.
    """
    # Of its steps at the exit the first one: torch has said by then that its loaders' deaths are no error.
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
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch takes the end of a loader process by SIGKILL for a fault
    for child in stubborn:
        child.kill()
