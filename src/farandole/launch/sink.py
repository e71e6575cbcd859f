"""The destination of the lines of an agent's workers: the terminal and files of its own process (output.py), or the
coordinator (forwarded_output.py)."""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """The interface of OutputSink. Call it on a running event loop; no call waits."""

    def expected(self, worker: str, rank: int) -> None: ...

    def placed(self, worker: str, rank: int) -> None: ...

    def line(self, worker: str, stream: str, data: bytes) -> None: ...

    def closed(self, worker: str) -> None: ...
