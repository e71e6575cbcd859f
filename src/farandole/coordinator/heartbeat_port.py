"""The UDP port on which the heartbeats of agents on other machines arrive, and are answered. server.py opens it at each
address at which it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

from farandole.liveness.heartbeats import HEARTBEAT_ID_BYTES, HeartbeatSeal, heartbeat_id_of
from farandole.wire.authentication import Role


class _Ends:
    """The two ends of one agent's connection. Address translation may change the agent's address; the newest heartbeat
    tells it, and to which of our addresses it was sent."""

    def __init__(self, agent: str, seal: HeartbeatSeal) -> None:
        self.agent, self.seal = agent, seal
        self.address: Any = None
        self.transport: asyncio.DatagramTransport | None = None
        self.sequence = 0


class HeartbeatPort:
    """Calls `on_heartbeat(agent, sequence, received)` for each valid heartbeat. Open from the first `open` to
    `close`."""

    def __init__(self, token: bytes, on_heartbeat: Callable[[str, int, int], None]) -> None:
        self._token, self._on_heartbeat = token, on_heartbeat
        self._transports: list[asyncio.DatagramTransport] = []
        self._by_id: dict[bytes, _Ends] = {}
        self._by_agent: dict[str, bytes] = {}

    async def open(self, host: str, port: int) -> None:
        """Open the port at one more address. Raises OSError when another process has this UDP port."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _HeartbeatEndpoint(self), local_addr=(host, port))
        self._transports.append(transport)

    def expect(self, agent: str) -> bytes:
        """Return a new id for the connection of `agent`."""
        self.forget(agent)
        heartbeat_id = secrets.token_bytes(HEARTBEAT_ID_BYTES)
        self._by_id[heartbeat_id] = _Ends(agent, HeartbeatSeal(self._token, heartbeat_id, Role.LISTENER))
        self._by_agent[agent] = heartbeat_id
        return heartbeat_id

    def forget(self, agent: str) -> None:
        """Ignore all further datagrams of the agent."""
        if (heartbeat_id := self._by_agent.pop(agent, None)) is not None:
            del self._by_id[heartbeat_id]

    def send(self, agent: str, sequence: int, received: int) -> None:
        """Send a heartbeat to the agent if its address is known. The datagram may be lost."""
        ends = self._by_id.get(self._by_agent.get(agent, b""))
        if ends is not None and ends.transport is not None:
            with contextlib.suppress(OSError):
                ends.transport.sendto(ends.seal.seal(sequence, received), ends.address)

    def close(self) -> None:
        """Close the port. Idempotent."""
        for transport in self._transports:
            transport.close()

    def received(self, data: bytes, sender: Any, transport: asyncio.DatagramTransport) -> None:
        """Handle a datagram that has arrived at one of the addresses."""
        ends = self._by_id.get(heartbeat_id_of(data) or b"")
        heartbeat = None if ends is None else ends.seal.open(data)
        if ends is None or heartbeat is None:
            return
        sequence, received = heartbeat
        if sequence > ends.sequence:
            ends.sequence, ends.address, ends.transport = sequence, sender, transport
            self._on_heartbeat(ends.agent, sequence, received)


class _HeartbeatEndpoint(asyncio.DatagramProtocol):
    """The port at one address."""

    def __init__(self, port: HeartbeatPort) -> None:
        self._port = port
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._port.received(data, addr, self._transport)

    def error_received(self, exc: Exception) -> None:
        """Ignore the error: an unreachable agent is silent, and silence is judged elsewhere."""
