"""The output of workers of other machines, shown like that of workers of this one. Used by local.py."""

from __future__ import annotations

from collections import defaultdict

from farandole.launch.sink import Sink
from farandole.messages import OutputMessage, WorkerPrinted, WorkerRanked, WorkerSilent


class RemoteOutput:
    """Call it with an agent and its message about its workers' output; with None when no more will come."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._talking: defaultdict[str, set[str]] = defaultdict(set)  # workers by agent

    def __call__(self, agent: str, message: OutputMessage | None) -> None:
        match message:
            case None:
                for worker in sorted(self._talking.pop(agent, ())):
                    self._sink.closed(worker)
            case WorkerPrinted(worker, stream, lines, dropped_bytes):
                self._talking[agent].add(worker)
                if dropped_bytes:
                    note = f"({dropped_bytes} bytes were dropped here: the connection was too slow)"
                    self._sink.line(worker, stream, note.encode())
                for line in lines:
                    self._sink.line(worker, stream, line)
            case WorkerRanked(worker, rank, is_expected):
                self._talking[agent].add(worker)
                if is_expected:
                    self._sink.expected(worker, rank)
                else:
                    self._sink.placed(worker, rank)
            case WorkerSilent(worker):
                self._talking[agent].discard(worker)
                self._sink.closed(worker)
