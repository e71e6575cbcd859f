"""The UDP port on which heartbeats of remote agents arrive and are answered. Used by server.py."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

from farandole.authentication import Role
from farandole.heartbeat_datagram import HEARTBEAT_ID_BYTES, HeartbeatSeal, heartbeat_id_of


class _Ends:
    """The two ends of one agent's connection. Address translation may change the agent's address; the newest heartbeat
    tells it."""

    def __init__(self, agent: str, seal: HeartbeatSeal) -> None:
        self.agent, self.seal = agent, seal
        self.address: Any = None
        self.sequence = 0


class HeartbeatPort(asyncio.DatagramProtocol):
    """Calls `on_heartbeat(agent, sequence, heard)` for each valid heartbeat. Open from `open` to `close`."""

    def __init__(self, token: bytes, on_heartbeat: Callable[[str, int, int], None]) -> None:
        self._token, self._on_heartbeat = token, on_heartbeat
        self._transport: asyncio.DatagramTransport | None = None
        self._by_id: dict[bytes, _Ends] = {}
        self._by_agent: dict[str, bytes] = {}

    async def open(self, host: str, port: int) -> None:
        """Open the port. Raises OSError when another process has this UDP port."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(host, port))

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

    def send(self, agent: str, sequence: int, heard: int) -> None:
        """Send a heartbeat to the agent if its address is known. The datagram may be lost."""
        ends = self._by_id.get(self._by_agent.get(agent, b""))
        if ends is not None and ends.address is not None and self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.sendto(ends.seal.seal(sequence, heard), ends.address)

    def close(self) -> None:
        """Close the port. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        ends = self._by_id.get(heartbeat_id_of(data) or b"")
        heartbeat = None if ends is None else ends.seal.open(data)
        if ends is None or heartbeat is None:
            return
        sequence, heard = heartbeat
        if sequence > ends.sequence:
            ends.sequence, ends.address = sequence, addr
            self._on_heartbeat(ends.agent, sequence, heard)

    def error_received(self, exc: Exception) -> None:
        """Ignore the error: an unreachable agent is silent, and silence is judged elsewhere."""
