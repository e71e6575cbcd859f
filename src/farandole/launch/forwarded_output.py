"""The output of workers on its way to the coordinator, which shows it. Used by agents of other machines.

Lines are collected for a moment, so that a message carries many. Lines that the connection does not take are dropped
and counted: neither the workers nor the agent's own messages wait for it.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol, cast

from farandole.messages import Message, WorkerPrinted, WorkerRanked, WorkerSilent

UNSENT_LIMIT = 1 << 20
"""Bytes that may wait for the connection before lines are dropped."""

_COLLECT_S = 0.02
_MESSAGE_BYTES = 1 << 16

Stream = Literal["stdout", "stderr"]


class Line(Protocol):
    """The part of a Channel that is needed here."""

    @property
    def unsent_bytes(self) -> int: ...

    def send(self, message: Message) -> None: ...


class ForwardedOutput:
    """A Sink, used on one event loop."""

    def __init__(self, channel: Line) -> None:
        self._channel = channel
        self._lines: dict[tuple[str, Stream], list[bytes]] = {}
        self._bytes = 0
        self._dropped: dict[tuple[str, Stream], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def expected(self, worker: str, rank: int) -> None:
        self._channel.send(WorkerRanked(worker, rank, is_expected=True))

    def placed(self, worker: str, rank: int) -> None:
        self.flush()  # earlier lines keep their label
        self._channel.send(WorkerRanked(worker, rank, is_expected=False))

    def line(self, worker: str, stream: str, data: bytes) -> None:
        key = (worker, cast(Stream, stream))
        if self._bytes + self._channel.unsent_bytes > UNSENT_LIMIT:
            self._dropped[key] = self._dropped.get(key, 0) + len(data) + 1
            return
        self._lines.setdefault(key, []).append(data)
        self._bytes += len(data)
        if self._bytes >= _MESSAGE_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COLLECT_S, self.flush)

    def closed(self, worker: str) -> None:
        self.flush()
        self._channel.send(WorkerSilent(worker))

    def stop(self) -> None:
        """Stop sending. Lines that were not sent are lost with the connection. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def flush(self) -> None:
        """Send the collected lines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        collected, self._lines, self._bytes = self._lines, {}, 0
        for (worker, stream), lines in collected.items():
            dropped_bytes = self._dropped.pop((worker, stream), 0)
            self._channel.send(WorkerPrinted(worker, stream, tuple(lines), dropped_bytes))
