"""The connection of a worker to its agent: frames in, frames out, directly on the event loop's selector.

No streams and no tasks in between: an ABORT must reach a blocked worker at once, and the last message of a process must
be readable at the moment when it is known to have ended. Used by worker_server.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from farandole.errors import FatalError, ProtocolError
from farandole.wire import WORKER_FRAME_LIMIT, FrameBuffer

_READ_BYTES = 1 << 16
_UNREAD_LIMIT = 4 * WORKER_FRAME_LIMIT


class WorkerConnection:
    """Calls `on_payload(connection, payload)` for each frame; it may raise a FatalError to refuse the frame. Calls
    `on_end(connection, error)` once, when the connection has ended by itself: `error` is None at the end of the stream,
    otherwise the cause. The socket is closed by then."""

    def __init__(
        self,
        connected: socket.socket,
        on_payload: Callable[[WorkerConnection, bytes], None],
        on_end: Callable[[WorkerConnection, FatalError | None], None],
    ) -> None:
        self.worker: str | None = None  # known from its Hello on
        self._socket = connected
        self._on_payload, self._on_end = on_payload, on_end
        self._incoming = FrameBuffer(WORKER_FRAME_LIMIT)
        self._outgoing = bytearray()
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)

    def write(self, data: bytes) -> None:
        """Pass `data` to the kernel now, or as soon as it takes more. Does nothing once the connection has ended."""
        if not self._is_open:
            return
        waiting = bool(self._outgoing)
        self._outgoing += data
        if not waiting and not self._send():
            self._loop.add_writer(self._socket, self._send_rest)
        if len(self._outgoing) > _UNREAD_LIMIT:
            self._end(ProtocolError(f"it left {len(self._outgoing)} bytes of messages unread"))

    def read_rest(self) -> None:
        """Read all that has arrived, without waiting for more."""
        while self._is_open and self._read():
            pass

    def close(self) -> None:
        """Close the connection without a call of `on_end`. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _read(self) -> bool:
        """Read once; return False when there was no data."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # reset by a process that was killed before it had read everything
            data = b""
        if not data:
            self._end(None)
            return False
        try:
            for payload in self._incoming.feed(data):
                if self._is_open:
                    self._on_payload(self, payload)
        except FatalError as error:
            self._end(error)
        return True

    def _send(self) -> bool:
        """Send as much as the kernel takes; return True when nothing is left."""
        try:
            sent = self._socket.send(self._outgoing)
        except BlockingIOError:
            return False
        except OSError:
            sent = len(self._outgoing)  # the reader is gone; the end of the stream is about to arrive
        del self._outgoing[:sent]
        return not self._outgoing

    def _send_rest(self) -> None:
        if self._send():
            self._loop.remove_writer(self._socket)

    def _end(self, error: FatalError | None) -> None:
        if self._is_open:
            self.close()
            self._on_end(self, error)
