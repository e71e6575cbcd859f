"""Writing that never blocks the event loop: for a terminal after Ctrl-S, a pager without input, a slow disk. Used by
output.py and report.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import BinaryIO, Generic, TextIO, TypeVar, cast

from farandole.wire.sockets import can_write

BACKLOG_BYTES = 64 << 20
"""Bytes that may wait to be written. Further data is dropped: training does not stop for its output."""

CLOSE_S = 5.0
"""Seconds that the last lines may take at the end of a job."""

OWN_PREFIX = "[farandole] "
"""Prefix of the launcher's own messages; the workers' output begins with their rank."""

Target = TypeVar("Target")


class BackgroundWriter(Generic[Target]):
    """Calls `write(target, data)` in a thread of its own, in the order of `put`; pieces that follow each other to the
    same target are joined. `write` must not raise. `on_dropped(bytes)` is called in that thread when writing continues
    after pieces had to be dropped."""

    def __init__(
        self,
        name: str,
        write: Callable[[Target, bytes], None],
        on_dropped: Callable[[int], None],
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self._write, self._on_dropped, self._backlog_bytes = write, on_dropped, backlog_bytes
        self._changed = threading.Condition()
        self._waiting: list[tuple[Target, bytes]] = []
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, target: Target, data: bytes) -> None:
        """Have `data` written soon. Never waits; ignored after `close`."""
        with self._changed:
            if self._is_closed:
                return
            if self._waiting_bytes + len(data) > self._backlog_bytes:
                self._dropped_bytes += len(data)
                return
            self._waiting.append((target, data))
            self._waiting_bytes += len(data)
            self._changed.notify()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Finish, and return whether all was written within `timeout_s`; otherwise the thread is abandoned.
        Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            pieces, dropped_bytes = taken
            for target, data in _joined(pieces):
                self._write(target, data)
            if dropped_bytes:
                self._on_dropped(dropped_bytes)

    def _take(self) -> tuple[list[tuple[Target, bytes]], int] | None:
        """Return all waiting data, as soon as there is any, and how much was dropped; None at the end."""
        with self._changed:
            # Without a deadline: the thread has nothing else to do, and `close` always wakes it.
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            taken = self._waiting, self._dropped_bytes
            self._waiting, self._waiting_bytes, self._dropped_bytes = [], 0, 0
            return taken


def unbuffered(stream: TextIO) -> BinaryIO:
    """Return the unbuffered byte stream of a text stream: a thread that is blocked in a buffered write holds a lock
    that the interpreter needs when it exits."""
    stream.flush()
    binary = getattr(stream, "buffer", None)
    if binary is None:  # a notebook's
        return cast(BinaryIO, _TextOnly(stream))
    raw: BinaryIO = getattr(binary, "raw", binary)
    return raw


class _TextOnly:
    """Takes bytes for a stream that accepts text only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes | memoryview) -> int:
        self._stream.write(bytes(data).decode("utf-8", "backslashreplace"))
        self._stream.flush()
        return len(data)


def write_all(raw: BinaryIO, data: bytes) -> None:
    """Write all of `data`, and wait as long as needed. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written: int | None = raw.write(rest)
        if written is None:  # another process has made our terminal non-blocking
            can_write(raw, within_s=1.0)
        else:
            rest = rest[written:]


def _joined(pieces: list[tuple[Target, bytes]]) -> list[tuple[Target, bytes]]:
    joined: list[tuple[Target, list[bytes]]] = []
    for target, data in pieces:
        if joined and joined[-1][0] == target:
            joined[-1][1].append(data)
        else:
            joined.append((target, [data]))
    return [(target, b"".join(parts)) for target, parts in joined]
