"""Heartbeats as datagrams, beside the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from farandole.base.liveness.heartbeats import HeartbeatSeal
from farandole.base.membership import Address
from farandole.base.wire.authentication import Role


class HeartbeatSocket(asyncio.DatagramProtocol):
    """Calls `on_heartbeat(sequence, received)` for each valid heartbeat of the coordinator. Open from `open` to
    `close`."""

    def __init__(self, token: bytes, heartbeat_id: bytes, on_heartbeat: Callable[[int, int], object]) -> None:
        self._seal, self._on_heartbeat = HeartbeatSeal(token, heartbeat_id, Role.DIALER), on_heartbeat
        self._transport: asyncio.DatagramTransport | None = None

    async def open(self, to: Address) -> None:
        """Open the socket. Raises OSError when the system has no socket."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=(to.host, to.port))

    def send(self, sequence: int, received: int) -> None:
        """Send a heartbeat. The datagram may be lost."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.sendto(self._seal.seal(sequence, received))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if (heartbeat := self._seal.open(data)) is not None:
            self._on_heartbeat(*heartbeat)

    def error_received(self, exc: Exception) -> None:
        """Ignore the error: an unreachable coordinator is silent, and silence is judged elsewhere."""
