"""Writes copies of the coordinator's states to where the next launcher looks for them (launch/job_state.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farandole.base.events.event import Event
from farandole.base.events.host_events import StateUnwritten, StateWritten
from farandole.base.machine import now_s
from farandole.errors import FarandoleError
from farandole.job.coordinator.journal import Journal, JournalFiles
from farandole.job.launch.job_state import StateUnavailable

_AGAIN_S = 0.2


class CopiesFailed(FarandoleError):
    """No copy could be written for as long as the patience."""


class StateCopies:
    """Writes one copy after the other, in a thread: the event loop runs on.

    write      as write_copy of JobState
    patience_s for so long a copy is tried again
    problem    why the newest copy could not be written yet; empty: it could, or nothing was tried
    """

    def __init__(self, write: Callable[[bytes], None], patience_s: float, on_event: Callable[[Event], None]) -> None:
        self._write, self._patience_s, self._on_event = write, patience_s, on_event
        self._turn = asyncio.Lock()
        self.problem = ""

    async def write(self, files: JournalFiles, job_id: str) -> None:
        """Write the newest state of a journal. Raises CopiesFailed."""
        async with self._turn:
            began_s = now_s()
            while not await self._was_written(files, job_id):
                waited_s = now_s() - began_s
                if waited_s > self._patience_s:
                    raise CopiesFailed(
                        f"the state of the job could not be written for {waited_s:.0f} s ({self.problem})"
                    )
                await asyncio.sleep(_AGAIN_S)
            if self.problem:
                self.problem = ""
                self._on_event(StateWritten(now_s() - began_s))

    async def _was_written(self, files: JournalFiles, job_id: str) -> bool:
        try:
            await asyncio.to_thread(lambda: self._write(Journal(files, job_id).newest()))
        except StateUnavailable as error:
            if not self.problem:
                self._on_event(StateUnwritten(str(error), self._patience_s))
            self.problem = str(error)
            return False
        return True
