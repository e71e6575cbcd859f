"""The connections of the page: accepted quietly, and bounded, since whoever reaches the address may open them."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Sequence

from aiohttp.http_exceptions import HttpProcessingError

from farandole.base.wire.listening import STRANGERS_LIMIT, FailureBudget, Listener

_DESCRIPTORS_OF_PROCESS = 64
"""Descriptors for everything but the page's connections."""


def most_connections(limit: int) -> int:
    """Return how many connections of one kind, with and without a request, fit below the limit of open files."""
    return max(8, min(STRANGERS_LIMIT, (limit - _DESCRIPTORS_OF_PROCESS) // 2))


def open_files_limit() -> int:
    """Return the limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class PageConnections:
    """Accepts connections, and hangs up on the oldest one without a complete request when there are too many of them.

    Args:
        protocol: Makes the protocol of a new connection.
        most: The number of connections without a request.
    """

    def __init__(self, protocol: Callable[[], asyncio.BaseProtocol], most: int) -> None:
        self._protocol, self._most = protocol, most
        self._idle: dict[asyncio.BaseTransport, None] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._listener = Listener(self._on_connection, FailureBudget())

    def open(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections at these sockets, which listen."""
        self._listener.open(sockets)

    def close(self) -> None:
        """Accept no further ones. Idempotent."""
        self._listener.close()

    def busy(self, transport: asyncio.BaseTransport) -> None:
        """Note that a request has come."""
        self._idle.pop(transport, None)

    def idle(self, transport: asyncio.BaseTransport) -> None:
        """Note that a connection is new, or that its request was served."""
        self._idle[transport] = None
        if len(self._idle) > self._most:
            self._idle = {each: None for each in self._idle if not each.is_closing()}
        while len(self._idle) > self._most:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            if isinstance(oldest, asyncio.Transport):
                oldest.abort()

    def _on_connection(self, connected: socket.socket, who: str) -> None:
        opening = asyncio.get_running_loop().create_task(self._open(connected))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connected: socket.socket) -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connected)
        self.idle(transport)


def quiet_logger() -> logging.Logger:
    """Return a logger for the server, without what the clients' bytes are to blame for: they must not fill a log."""
    logger = logging.getLogger("farandole.page")
    logger.addFilter(_is_own_fault)
    return logger


def _is_own_fault(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
