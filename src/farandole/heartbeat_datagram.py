"""Send heartbeats as datagrams, beside the connection: TCP retransmits lost data after 200 ms at the earliest. Pure.

Coordinator and agents use it, for budgets below a second. A datagram names its connection by a random id and carries a
MAC. It contains no secret, and a datagram that an attacker on the path replays has no effect.
"""

from __future__ import annotations

import hmac
import struct

from farandole.authentication import Role

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

    def seal(self, sequence: int, heard: int) -> bytes:
        heartbeat = _HEARTBEAT.pack(self._id, sequence, heard)
        return heartbeat + _mac(self._own_key, heartbeat)

    def open(self, datagram: bytes) -> tuple[int, int] | None:
        """Return (sequence, heard) of a heartbeat of the other end; None for any other datagram."""
        if heartbeat_id_of(datagram) != self._id:
            return None
        heartbeat, mac = datagram[: _HEARTBEAT.size], datagram[_HEARTBEAT.size :]
        if not hmac.compare_digest(mac, _mac(self._other_key, heartbeat)):
            return None
        _, sequence, heard = _HEARTBEAT.unpack(heartbeat)
        return sequence, heard


def _mac(key: bytes, heartbeat: bytes) -> bytes:
    return hmac.digest(key, heartbeat, "sha256")[:_MAC_BYTES]
