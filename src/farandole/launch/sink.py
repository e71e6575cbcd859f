"""Where the lines of an agent's workers go: to the terminal and files of its own process (output.py), or to the
coordinator (forwarded_output.py)."""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """See OutputSink. To be called on a running event loop; no call waits."""

    def expected(self, worker: str, rank: int) -> None: ...

    def placed(self, worker: str, rank: int) -> None: ...

    def line(self, worker: str, stream: str, data: bytes) -> None: ...

    def closed(self, worker: str) -> None: ...
