"""Heartbeats between coordinator and agents: their counting, and their datagrams. Pure.

Each heartbeat acknowledges the newest one received from the other side. So a side knows a time at which both directions
still worked: when it sent the newest of its heartbeats that was acknowledged.
"""

from __future__ import annotations

import hmac
import struct
from collections import deque

from farandole.base.wire.authentication import Role

LONGEST_HEARTBEAT_S = 0.5

_REMEMBERED = 1000
"""The number of unacknowledged heartbeats whose time is kept. Older times are useless: a side that receives any
heartbeat also receives newer ones, and a side without contact for minutes counts as silent since its last
acknowledgement."""


_EACH_AGENT_S = 0.0015
"""Heartbeats of all agents together come 667 times a second at most, unless that would be too rarely for the budget."""


def heartbeat_period_s(budget_s: float, agents: int = 1) -> float:
    """Return the seconds between two heartbeats where silence may last `budget_s`, in a job with so many agents. Above
    about 200 agents heartbeats are rarer than ten in a budget, but never rarer than four: the coordinator would else
    spend most of its idle time on them."""
    return max(min(budget_s / 10, LONGEST_HEARTBEAT_S), min(budget_s / 4, agents * _EACH_AGENT_S))


class Heartbeats:
    """The heartbeats of one side, counted from 1; the message that opened the connection counts as number 0.

    Attributes:
        received: The newest heartbeat of the other side.
        reached_s: The time at which the newest of this side's acknowledged heartbeats was sent.
    """

    def __init__(self, now_s: float) -> None:
        self.sequence = 0
        self.received = 0
        self.reached_s = now_s
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def next(self, now_s: float) -> int:
        """Return the number of the heartbeat that is sent now, together with `received`."""
        self.sequence += 1
        self._sent.append((self.sequence, now_s))
        return self.sequence

    def record(self, sequence: int, received: int) -> bool:
        """Record heartbeat `sequence` of the other side, which acknowledges this side's `received`. Returns whether
        that is news of both directions: the same heartbeat may come twice, on two paths."""
        self.received = max(self.received, sequence)
        before_s = self.reached_s
        while self._sent and self._sent[0][0] <= received:
            self.reached_s = self._sent.popleft()[1]
        return self.reached_s > before_s


# Datagrams ------------------------------------------------------------------------------------------------------------
#
# For budgets below a second, coordinator and agents also send heartbeats as datagrams, beside the connection: TCP
# retransmits lost data after 200 ms at the earliest (TCP_RTO_MIN in Linux, include/net/tcp.h). A datagram names its
# connection by a random id and carries a MAC. It contains no secret, and a datagram that an attacker on the path
# replays has no effect.

HEARTBEAT_ID_BYTES = 16
SLOW_BUDGET_S = 1.0
"""The budget from which on TCP is fast enough, in seconds."""

_MAC_BYTES = 16
_HEARTBEAT = struct.Struct(f">{HEARTBEAT_ID_BYTES}sQQ")


def heartbeat_id_of(datagram: bytes) -> bytes | None:
    """Return the id of a datagram's connection, if it is a heartbeat. It is not authenticated yet."""
    return datagram[:HEARTBEAT_ID_BYTES] if len(datagram) == _HEARTBEAT.size + _MAC_BYTES else None


class HeartbeatSeal:
    """Seals and opens the heartbeats of one end of one connection. The `role` of the end that dialed is the agent."""

    def __init__(self, token: bytes, heartbeat_id: bytes, role: Role) -> None:
        self._id = heartbeat_id
        self._own_key, self._other_key = (
            hmac.digest(token, b"farandole heartbeats " + each.value + heartbeat_id, "sha256")
            for each in (role, role.other)
        )

    def seal(self, sequence: int, received: int) -> bytes:
        heartbeat = _HEARTBEAT.pack(self._id, sequence, received)
        return heartbeat + _mac(self._own_key, heartbeat)

    def open(self, datagram: bytes) -> tuple[int, int] | None:
        """Return (sequence, received) of a heartbeat of the other end; None for any other datagram."""
        if heartbeat_id_of(datagram) != self._id:
            return None
        heartbeat, mac = datagram[: _HEARTBEAT.size], datagram[_HEARTBEAT.size :]
        if not hmac.compare_digest(mac, _mac(self._other_key, heartbeat)):
            return None
        _, sequence, received = _HEARTBEAT.unpack(heartbeat)
        return sequence, received


def _mac(key: bytes, heartbeat: bytes) -> bytes:
    return hmac.digest(key, heartbeat, "sha256")[:_MAC_BYTES]
