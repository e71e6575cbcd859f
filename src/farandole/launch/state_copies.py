"""Writes copies of the coordinator's states to where the next launcher looks for them (launch/job_state.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farandole.coordinator.journal import Journal, JournalFiles
from farandole.errors import FarandoleError
from farandole.events import Event, StateUnwritten, StateWritten
from farandole.launch.job_state import StateUnavailable
from farandole.machine import now_s

_AGAIN_S = 0.2


class CopiesFailed(FarandoleError):
    """No copy could be written for as long as the patience."""


class StateCopies:
    """Writes one copy after the other, in a thread: the event loop runs on.

    write      as write_copy of JobState
    patience_s for so long a copy is tried again
    """

    def __init__(self, write: Callable[[bytes], None], patience_s: float, on_event: Callable[[Event], None]) -> None:
        self._write, self._patience_s, self._on_event = write, patience_s, on_event
        self._turn = asyncio.Lock()

    async def write(self, files: JournalFiles, job_id: str) -> None:
        """Write the newest state of a journal. Raises CopiesFailed."""
        async with self._turn:
            began_s, is_told = now_s(), False
            while True:
                try:
                    await asyncio.to_thread(lambda: self._write(Journal(files, job_id).newest()))
                    break
                except StateUnavailable as error:
                    waited_s = now_s() - began_s
                    if waited_s > self._patience_s:
                        raise CopiesFailed(
                            f"the state of the job could not be written for {waited_s:.0f} s: {error}"
                        ) from None
                    if not is_told:
                        is_told = True
                        self._on_event(StateUnwritten(str(error), self._patience_s))
                    await asyncio.sleep(_AGAIN_S)
            if is_told:
                self._on_event(StateWritten(now_s() - began_s))
