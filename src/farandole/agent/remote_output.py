"""The output of workers on other machines: forwarded by their agent, shown by the coordinator's process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Literal, Protocol, cast

from farandole.wire.messages import Message, OutputMessage, WorkerPrinted, WorkerRanked, WorkerSilent


class Sink(Protocol):
    """The destination of the lines of an agent's workers: an OutputSink (launch/output.py), or the coordinator.

    Call it on a running event loop; no call waits.
    """

    def expected(self, worker: str, rank: int) -> None: ...

    def placed(self, worker: str, rank: int) -> None: ...

    def line(self, worker: str, stream: str, data: bytes) -> None: ...

    def closed(self, worker: str) -> None: ...


# On the other machine: forwarded to the coordinator -------------------------------------------------------------------

UNSENT_LIMIT = 1 << 20
"""Bytes that may wait for the connection before lines are dropped."""

_COLLECT_S = 0.02
_MESSAGE_BYTES = 1 << 16

OutputStream = Literal["stdout", "stderr"]


class MessageSender(Protocol):
    """The part of a Channel that is needed here."""

    @property
    def unsent_bytes(self) -> int: ...

    def send(self, message: Message) -> None: ...


class ForwardedOutput:
    """A Sink, used on one event loop."""

    def __init__(self, channel: MessageSender) -> None:
        self._channel = channel
        self._lines: dict[tuple[str, OutputStream], list[bytes]] = {}
        self._bytes = 0
        self._dropped: dict[tuple[str, OutputStream], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def expected(self, worker: str, rank: int) -> None:
        self._channel.send(WorkerRanked(worker, rank, is_expected=True))

    def placed(self, worker: str, rank: int) -> None:
        self.flush()  # earlier lines keep their label
        self._channel.send(WorkerRanked(worker, rank, is_expected=False))

    def line(self, worker: str, stream: str, data: bytes) -> None:
        key = (worker, cast(OutputStream, stream))
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


# In the coordinator's process: shown like the output of workers on its own machine ------------------------------------


class RemoteOutput:
    """Call it with an agent and its message about its workers' output; with None when no more will come."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._printing: defaultdict[str, set[str]] = defaultdict(set)  # workers by agent

    def __call__(self, agent: str, message: OutputMessage | None) -> None:
        match message:
            case None:
                for worker in sorted(self._printing.pop(agent, ())):
                    self._sink.closed(worker)
            case WorkerPrinted(worker, stream, lines, dropped_bytes):
                self._printing[agent].add(worker)
                if dropped_bytes:
                    note = f"({dropped_bytes} bytes of output were dropped here: the connection was too slow)"
                    self._sink.line(worker, stream, note.encode())
                for line in lines:
                    self._sink.line(worker, stream, line)
            case WorkerRanked(worker, rank, is_expected):
                self._printing[agent].add(worker)
                if is_expected:
                    self._sink.expected(worker, rank)
                else:
                    self._sink.placed(worker, rank)
            case WorkerSilent(worker):
                self._printing[agent].discard(worker)
                self._sink.closed(worker)
