"""What workers have left for the caller of farandole.run(), on its way to the coordinator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from farandole.base.machine import wall_time_s
from farandole.base.wire.function_call import PART_BYTES, ReturnPart


class Returns:
    """Sends each return in parts, the next one when the coordinator has received the one before."""

    def __init__(self) -> None:
        self._received: dict[str, asyncio.Event] = {}  # by worker: set when its last part was received
        self._waits = True

    async def send(self, worker: str, path: Path, send: Callable[[ReturnPart], None]) -> None:
        """Send what is in the file of a worker, and remove it; nothing if there is none."""
        if not path.exists():  # it was killed, or has exited early
            return
        received = self._received[worker] = asyncio.Event()
        with path.open("rb") as file:
            age_s = max(0.0, wall_time_s() - os.fstat(file.fileno()).st_mtime)
            data = file.read(PART_BYTES)
            while data:
                following = file.read(PART_BYTES)
                send(ReturnPart(worker, data, not following, age_s))
                if following and self._waits:
                    await received.wait()
                    received.clear()
                data = following
        del self._received[worker]
        path.unlink(missing_ok=True)

    def on_received(self, worker: str) -> None:
        """Send the next part of this worker's return."""
        if worker in self._received:
            self._received[worker].set()

    def stop_waiting(self) -> None:
        """Send the remaining parts without an answer: there will be none."""
        self._waits = False
        for received in self._received.values():
            received.set()
