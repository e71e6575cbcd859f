"""The signs of life of agents: how long each has been silent; and the heartbeats of those on other machines, over their
connections, and as datagrams beside them, for which there is a UDP port at each address at which reception.py listens.
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


class Silence:
    """The time of the last message of each agent. A verdict takes two looks: in between, the event loop has read every
    socket, so a message that had arrived but was not read yet still counts."""

    def __init__(self, budget_s: float) -> None:
        self.look_every_s = budget_s / 20
        self._limit_s = budget_s - 2 * self.look_every_s
        self._received_s: dict[str, float] = {}
        self._suspects: set[str] = set()

    def record(self, agent: str, now_s: float) -> None:
        self._received_s[agent] = now_s
        self._suspects.discard(agent)

    def forget(self, agent: str) -> None:
        self._received_s.pop(agent, None)
        self._suspects.discard(agent)

    def look(self, now_s: float) -> dict[str, float]:
        """Return the agents whose silence has lasted for about the budget (never more, if called as often as
        `look_every_s` says), and for how many seconds."""
        silent = {agent: now_s - received_s for agent, received_s in self._received_s.items()}
        silent = {agent: silent_s for agent, silent_s in silent.items() if silent_s >= self._limit_s}
        lost = {agent: silent_s for agent, silent_s in silent.items() if agent in self._suspects}
        self._suspects.update(silent)
        return lost


# The heartbeats of agents on other machines ---------------------------------------------------------------------------


class _Exchange:
    """The heartbeats of one agent. Address translation may change the agent's address: the newest datagram, of this
    `sequence`, tells it, and to which of our addresses it was sent."""

    def __init__(self, agent: str, now_s: float, token: bytes) -> None:
        self.agent, self.received_s, self.heartbeats = agent, now_s, Heartbeats(now_s)
        self.id = secrets.token_bytes(HEARTBEAT_ID_BYTES)
        self.seal = HeartbeatSeal(token, self.id, Role.LISTENER)
        self.address: Any = None
        self.transport: asyncio.DatagramTransport | None = None
        self.sequence = 0


class AgentHeartbeats:
    """`on_reached(agent, at_s)`: the agent has received what the coordinator sent at `at_s`, and its answer has
    come."""

    def __init__(
        self, token: bytes, budget_s: float, now_s: Callable[[], float], on_reached: Callable[[str, float], None]
    ) -> None:
        self._token, self._budget_s = token, budget_s
        self._now_s, self._on_reached = now_s, on_reached
        self._by_agent: dict[str, _Exchange] = {}
        self._by_id: dict[bytes, _Exchange] = {}
        self._transports: list[asyncio.DatagramTransport] = []
        self._has_datagrams = budget_s < SLOW_BUDGET_S
        self.udp_port = 0
        """UDP port on which datagrams are received; 0: none."""

    async def open(self, address: Address) -> None:
        """Also receive datagrams if the budget requires it and the port is free. On a good network TCP alone
        suffices."""
        if not self._has_datagrams:
            return
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_datagram_endpoint(
                lambda: _Endpoint(self._on_datagram), local_addr=(address.host, address.port)
            )
        except OSError:
            self._has_datagrams = bool(self._transports)
        else:
            self._transports.append(transport)
            self.udp_port = address.port

    def __contains__(self, agent: str) -> bool:
        return agent in self._by_agent

    def begin(self, agent: str) -> bytes:
        """Register an agent that has joined and return the id of its datagrams, which is empty if there are none."""
        self.forget(agent)
        exchange = self._by_agent[agent] = _Exchange(agent, self._now_s(), self._token)
        self._by_id[exchange.id] = exchange
        return exchange.id if self._has_datagrams else b""

    def lease_end_s(self, agent: str) -> float | None:
        """Return when the lease of an agent that is lost now ends, as far as is known: until then the agent or its
        guard may let its workers run. The lease counts from the last heartbeat that the agent answered. None: the agent
        never joined."""
        exchange = self._by_agent.get(agent)
        return None if exchange is None else exchange.received_s + self._budget_s

    def forget(self, agent: str) -> None:
        if (exchange := self._by_agent.pop(agent, None)) is not None:
            del self._by_id[exchange.id]

    def heartbeat(self, send: Callable[[str, CoordinatorHeartbeat], None], every_s: float) -> None:
        """Send a heartbeat to each agent, with `send` and, if its address is known, as a datagram, which may be lost.
        Agents are to send theirs `every_s`."""
        for agent, exchange in self._by_agent.items():
            sequence, received = exchange.heartbeats.next(self._now_s()), exchange.heartbeats.received
            send(agent, CoordinatorHeartbeat(sequence, received, every_s))
            if exchange.transport is not None:
                with contextlib.suppress(OSError):
                    exchange.transport.sendto(exchange.seal.seal(sequence, received), exchange.address)

    def record(self, agent: str, sequence: int, received: int) -> None:
        """Record a heartbeat that came over TCP or as a datagram."""
        exchange = self._by_agent.get(agent)
        if exchange is None:
            return
        exchange.received_s = self._now_s()
        if exchange.heartbeats.record(sequence, received):
            self._on_reached(agent, exchange.heartbeats.reached_s)

    def close(self) -> None:
        """Close the port. Idempotent."""
        for transport in self._transports:
            transport.close()

    def _on_datagram(self, data: bytes, sender: Any, transport: asyncio.DatagramTransport) -> None:
        exchange = self._by_id.get(heartbeat_id_of(data) or b"")
        if exchange is None or (heartbeat := exchange.seal.open(data)) is None:
            return
        sequence, received = heartbeat
        if sequence > exchange.sequence:
            exchange.sequence, exchange.address, exchange.transport = sequence, sender, transport
            self.record(exchange.agent, sequence, received)


class _Endpoint(asyncio.DatagramProtocol):
    """The port at one address."""

    def __init__(self, on_datagram: Callable[[bytes, Any, asyncio.DatagramTransport], None]) -> None:
        self._on_datagram = on_datagram
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._on_datagram(data, addr, self._transport)

    def error_received(self, exc: Exception) -> None:
        """Ignore the error: an unreachable agent is silent, and silence is judged elsewhere."""
