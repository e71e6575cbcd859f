"""Beats as datagrams, beside the connection: TCP sends what was lost again after 200 ms at the earliest. Used by
coordinator and agents, for budgets below a second. Pure.

A datagram names its connection by a random id and carries a MAC. Nothing is secret in it, and an old one, sent again
by somebody on the path, tells nothing new.
"""

from __future__ import annotations

import hmac
import struct

from farandole.authentication import Role

BEAT_ID_BYTES = 16
SLOW_BUDGET_S = 1.0
"""From this budget on, TCP is fast enough."""

_MAC_BYTES = 16
_BEAT = struct.Struct(f">{BEAT_ID_BYTES}sQQ")


def beat_id_of(datagram: bytes) -> bytes | None:
    """Which connection a datagram is about, if it is a beat at all. Nothing is proved yet."""
    return datagram[:BEAT_ID_BYTES] if len(datagram) == _BEAT.size + _MAC_BYTES else None


class BeatSeal:
    """Of one end (`role`: who dialed is the agent) of one connection."""

    def __init__(self, token: bytes, beat_id: bytes, role: Role) -> None:
        self._id = beat_id
        self._own_key, self._other_key = (
            hmac.digest(token, b"farandole beats " + each.value + beat_id, "sha256") for each in (role, role.other)
        )

    def seal(self, sequence: int, heard: int) -> bytes:
        beat = _BEAT.pack(self._id, sequence, heard)
        return beat + _mac(self._own_key, beat)

    def open(self, datagram: bytes) -> tuple[int, int] | None:
        """(sequence, heard) of a beat of the other end; None for anything else."""
        if beat_id_of(datagram) != self._id:
            return None
        beat, mac = datagram[: _BEAT.size], datagram[_BEAT.size :]
        if not hmac.compare_digest(mac, _mac(self._other_key, beat)):
            return None
        _, sequence, heard = _BEAT.unpack(beat)
        return sequence, heard


def _mac(key: bytes, beat: bytes) -> bytes:
    return hmac.digest(key, beat, "sha256")[:_MAC_BYTES]
