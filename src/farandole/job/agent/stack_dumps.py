"""The stacks of workers, which write them on a signal, whatever they execute, into the memory that they share with
their agent. Used by agent.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from farandole.base.liveness.status_reporting import DUMP_SIGNAL, StatusPage
from farandole.base.machine import now_s

DUMP_S = 3.0
"""Seconds that a worker may take to begin and to write its stacks: the handler needs no lock, but a core."""

_LOOK_S = 0.02
_QUIET_LOOKS = 4
"""Looks in a row that find the same text: faulthandler marks no end."""

_LONGEST_TEXT = 1 << 19


class Dump(NamedTuple):
    """The stacks of a worker's threads; or the problem, where there are none."""

    text: str
    problem: str = ""


class StackDumps:
    """Has workers write their stacks, one dump of a worker at a time. Used on one event loop.

    page_of  returns the status page of a worker; None: it has none
    pid_of   returns the process that called init(); None: there is none
    """

    def __init__(self, page_of: Callable[[str], StatusPage | None], pid_of: Callable[[str], int | None]) -> None:
        self._page_of, self._pid_of = page_of, pid_of
        self._turns: dict[str, asyncio.Lock] = {}

    async def dump(self, worker: str, within_s: float = DUMP_S) -> Dump:
        """Return the stacks of the worker's threads as they are now."""
        turn = self._turns.setdefault(worker, asyncio.Lock())
        try:
            async with turn:
                return await self._dump(worker, within_s)
        finally:
            if not turn.locked():
                self._turns.pop(worker, None)

    async def _dump(self, worker: str, within_s: float) -> Dump:
        page, pid = self._page_of(worker), self._pid_of(worker)
        if page is None or pid is None or not page.can_dump:
            return Dump("", "it has not called init() yet, has ended, or has no status page")
        if not page.begin_dump():
            return Dump("", "its page is full of stacks that were written before; only a new worker has room again")
        if not _has_bit(pid, "SigCgt"):  # another program runs in this process now, which the signal would end
            return Dump("", "its process has no handler for the signal, or has ended")
        if not _has_bit(pid, "ShdPnd"):  # a worker that was stopped still has to write those of the request before
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
        if text := await _written(page, within_s):
            return Dump(text[:_LONGEST_TEXT])
        return Dump("", f"it did not write them within {within_s:g} s: {_why_silent(pid)}")


async def _written(page: StatusPage, within_s: float) -> str:
    before, quiet_looks, deadline_s = "", 0, now_s() + within_s
    while now_s() < deadline_s:
        await asyncio.sleep(_LOOK_S)
        text = page.stacks()
        quiet_looks = quiet_looks + 1 if text and text == before else 0
        if quiet_looks == _QUIET_LOOKS:
            break
        before = text
    return page.stacks()


def _has_bit(pid: int, mask: str) -> bool:
    """Return whether the signal is in this set of the process (man 5 proc_pid_status): SigCgt, which it catches, or
    ShdPnd, which it has been sent and has not handled yet."""
    return bool(int(_status_of(pid).get(mask, "0"), 16) >> (DUMP_SIGNAL - 1) & 1)


def _why_silent(pid: int) -> str:
    """Return what the system knows of a process that does not handle a signal."""
    state = _status_of(pid).get("State", "")[:1]
    reasons = {
        "": "its process has ended",
        "Z": "its process has ended",
        "T": "a signal has stopped its process",
        "t": "a debugger holds its process",
        "D": "its process waits in the kernel, and cannot be interrupted",
    }
    return reasons.get(state, "its process runs, and gets no core")


def _status_of(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}
