"""Heartbeats as datagrams, beside the connection: TCP sends what was lost again after 200 ms at the earliest. Used by
coordinator and agents, for budgets below a second. Pure.

A datagram names its connection by a random id and carries a MAC. Nothing is secret in it, and an old one, sent again
by somebody on the path, tells nothing new.
"""

from __future__ import annotations

import hmac
import struct

from farandole.authentication import Role

HEARTBEAT_ID_BYTES = 16
SLOW_BUDGET_S = 1.0
"""From this budget on, TCP is fast enough."""

_MAC_BYTES = 16
_HEARTBEAT = struct.Struct(f">{HEARTBEAT_ID_BYTES}sQQ")


def heartbeat_id_of(datagram: bytes) -> bytes | None:
    """Which connection a datagram is about, if it is a heartbeat at all. Nothing is proved yet."""
    return datagram[:HEARTBEAT_ID_BYTES] if len(datagram) == _HEARTBEAT.size + _MAC_BYTES else None


class HeartbeatSeal:
    """Of one end (`role`: who dialed is the agent) of one connection."""

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
        """(sequence, heard) of a heartbeat of the other end; None for anything else."""
        if heartbeat_id_of(datagram) != self._id:
            return None
        heartbeat, mac = datagram[: _HEARTBEAT.size], datagram[_HEARTBEAT.size :]
        if not hmac.compare_digest(mac, _mac(self._other_key, heartbeat)):
            return None
        _, sequence, heard = _HEARTBEAT.unpack(heartbeat)
        return sequence, heard


def _mac(key: bytes, heartbeat: bytes) -> bytes:
    return hmac.digest(key, heartbeat, "sha256")[:_MAC_BYTES]
