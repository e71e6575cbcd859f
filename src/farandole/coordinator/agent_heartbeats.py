"""Heartbeats between the coordinator and remote agents, and the replies to them. Used by server.py."""

from __future__ import annotations

from collections.abc import Callable

from farandole.coordinator.heartbeat_port import HeartbeatPort
from farandole.heartbeat_datagram import SLOW_BUDGET_S
from farandole.heartbeats import Heartbeats
from farandole.membership import Address
from farandole.messages import CoordinatorHeartbeat


class AgentHeartbeats:
    """`on_reached(agent, at_s)`: the agent has received what the coordinator sent at `at_s`, and its answer has
    come."""

    def __init__(
        self, token: bytes, budget_s: float, now_s: Callable[[], float], on_reached: Callable[[str, float], None]
    ) -> None:
        self._now_s, self._on_reached = now_s, on_reached
        self._budget_s = budget_s
        self._heartbeats: dict[str, Heartbeats] = {}
        self._heard_s: dict[str, float] = {}
        self._port = HeartbeatPort(token, self.hear) if budget_s < SLOW_BUDGET_S else None
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
            self._port = None

    def __contains__(self, agent: str) -> bool:
        return agent in self._heartbeats

    def begin(self, agent: str) -> bytes:
        """Register an agent that has joined and return the id of its datagrams, which is empty if there are none."""
        self._heartbeats[agent] = Heartbeats(self._now_s())
        self._heard_s[agent] = self._now_s()
        return self._port.expect(agent) if self._port is not None else b""

    def lease_end_s(self, agent: str) -> float | None:
        """Return when the lease of an agent that is lost now ends, as far as is known: until then the agent or its
        guard may let its workers run. The lease counts from the last heartbeat that the agent answered. None: the agent
        never joined."""
        heard_s = self._heard_s.get(agent)
        return None if heard_s is None else heard_s + self._budget_s

    def forget(self, agent: str) -> None:
        self._heartbeats.pop(agent, None)
        self._heard_s.pop(agent, None)
        if self._port is not None:
            self._port.forget(agent)

    def heartbeat(self, send: Callable[[str, CoordinatorHeartbeat], None]) -> None:
        """Send a heartbeat to each agent, with `send` and by datagram."""
        for agent, heartbeats in self._heartbeats.items():
            sequence = heartbeats.next(self._now_s())
            send(agent, CoordinatorHeartbeat(sequence, heartbeats.heard))
            if self._port is not None:
                self._port.send(agent, sequence, heartbeats.heard)

    def hear(self, agent: str, sequence: int, heard: int) -> None:
        """Record a heartbeat that came over TCP or as a datagram."""
        heartbeats = self._heartbeats.get(agent)
        if heartbeats is None:
            return
        self._heard_s[agent] = self._now_s()
        if heartbeats.hear(sequence, heard):
            self._on_reached(agent, heartbeats.reached_s)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
