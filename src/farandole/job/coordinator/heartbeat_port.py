"""The heartbeats of agents on other machines: over their connections, and as datagrams beside them, for which there is
a UDP port at each address at which reception.py listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

from farandole.base.liveness.heartbeats import (
    HEARTBEAT_ID_BYTES,
    SLOW_BUDGET_S,
    Heartbeats,
    HeartbeatSeal,
    heartbeat_id_of,
)
from farandole.base.membership import Address
from farandole.base.wire.authentication import Role
from farandole.base.wire.messages import CoordinatorHeartbeat


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


# The heartbeats of agents on other machines: over their connections, and as datagrams beside them ---------------------


class AgentHeartbeats:
    """`on_reached(agent, at_s)`: the agent has received what the coordinator sent at `at_s`, and its answer has
    come."""

    def __init__(
        self, token: bytes, budget_s: float, now_s: Callable[[], float], on_reached: Callable[[str, float], None]
    ) -> None:
        self._now_s, self._on_reached = now_s, on_reached
        self._budget_s = budget_s
        self._heartbeats: dict[str, Heartbeats] = {}
        self._received_s: dict[str, float] = {}
        self._port = HeartbeatPort(token, self.record) if budget_s < SLOW_BUDGET_S else None
        self.udp_port = 0
        """UDP port on which datagrams are received; 0: none."""

    async def open(self, address: Address) -> None:
        """Also receive datagrams if the budget requires it and the port is free. On a good network TCP alone
        suffices."""
        if self._port is None:
            return
        try:
            await self._port.open(address.host, address.port)
            self.udp_port = address.port
        except OSError:
            if not self.udp_port:
                self._port = None

    def __contains__(self, agent: str) -> bool:
        return agent in self._heartbeats

    def begin(self, agent: str) -> bytes:
        """Register an agent that has joined and return the id of its datagrams, which is empty if there are none."""
        self._heartbeats[agent] = Heartbeats(self._now_s())
        self._received_s[agent] = self._now_s()
        return self._port.expect(agent) if self._port is not None else b""

    def lease_end_s(self, agent: str) -> float | None:
        """Return when the lease of an agent that is lost now ends, as far as is known: until then the agent or its
        guard may let its workers run. The lease counts from the last heartbeat that the agent answered. None: the agent
        never joined."""
        received_s = self._received_s.get(agent)
        return None if received_s is None else received_s + self._budget_s

    def forget(self, agent: str) -> None:
        self._heartbeats.pop(agent, None)
        self._received_s.pop(agent, None)
        if self._port is not None:
            self._port.forget(agent)

    def heartbeat(self, send: Callable[[str, CoordinatorHeartbeat], None], every_s: float) -> None:
        """Send a heartbeat to each agent, with `send` and by datagram. Agents are to send theirs `every_s`."""
        for agent, heartbeats in self._heartbeats.items():
            sequence = heartbeats.next(self._now_s())
            send(agent, CoordinatorHeartbeat(sequence, heartbeats.received, every_s))
            if self._port is not None:
                self._port.send(agent, sequence, heartbeats.received)

    def record(self, agent: str, sequence: int, received: int) -> None:
        """Record a heartbeat that came over TCP or as a datagram."""
        heartbeats = self._heartbeats.get(agent)
        if heartbeats is None:
            return
        self._received_s[agent] = self._now_s()
        if heartbeats.record(sequence, received):
            self._on_reached(agent, heartbeats.reached_s)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
