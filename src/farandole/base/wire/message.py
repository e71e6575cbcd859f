"""The base class of all messages, and the version of the protocol."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION = 9, 9
"""The newest and the oldest version of the protocol that this release speaks, on all connections. Two ends use the
newest version that both speak (wire/authentication.py).

The number stands for everything on which processes of a job must agree: messages and their fields, the proofs, data
connections, and what workers compute together, such as the order of samples. A release that changes any of it raises
the newest number. It raises the oldest one, too, unless it also speaks the former version: it must not send a peer of
that version anything newer.
"""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base class of all messages; the class's name is the tag on the wire."""
