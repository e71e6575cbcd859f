"""Both ends of a data connection prove their identity when it opens. Pure.

    dialer   -> acceptor   introduction: generation, both workers, channel, nonce of the dialer
    acceptor -> dialer     nonce of the acceptor, its proof
    dialer   -> acceptor   its proof

A proof is an HMAC-SHA256 under the generation's data key over the role, all fields of the introduction and the
acceptor's nonce. So a connection of another generation or between other workers, or a replayed recording, proves
nothing, and neither role's proof can be sent back as the other's.

It is not the handshake of agents (wire/authentication.py). There the listener speaks first and proves last, because a
stranger must not get a proof of the job's token, which a person may have chosen. Here the dialer speaks first, because
the acceptor waits for several dialers, and may send data one round trip after it dialed, which counts in each regroup.
The label in each proof differs from all labels there.
"""

from __future__ import annotations

import hmac
import struct

import msgspec

from farandole.errors import ProtocolError
from farandole.membership import GenerationId

NONCE_BYTES = 16
PROOF_BYTES = 32
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES
INTRODUCTION_LIMIT = 1024
"""The largest introduction in bytes, length included: it limits the memory that a stranger can occupy."""

_PREFIX = struct.Struct("!4sH")
_MAGIC = b"Frdd"


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """The generation, workers and channel of a connection attempt. Worker ids are those of the job."""

    generation: GenerationId
    dialer: str
    acceptor: str
    nonce: bytes
    channel: int = 0

    def encode(self) -> bytes:
        """Return the bytes that the dialer sends. Raises ValueError when the ids are too long to introduce."""
        body = msgspec.msgpack.encode(self)
        if _PREFIX.size + len(body) > INTRODUCTION_LIMIT:
            raise ValueError(f"worker ids {self.dialer!r} and {self.acceptor!r} are too long for an introduction")
        return _PREFIX.pack(_MAGIC, len(body)) + body

    def announces(self, other: Introduction) -> bool:
        """Return whether both describe the same connection; the nonce, new for each attempt, is ignored."""
        return (self.generation, self.dialer, self.acceptor, self.channel) == (
            other.generation,
            other.dialer,
            other.acceptor,
            other.channel,
        )


def decode_introduction(received: bytes) -> Introduction | None:
    """Decode the bytes that a caller has sent so far; None while they are incomplete.

    Raises ProtocolError for bytes that cannot become an introduction.
    """
    if not _MAGIC.startswith(received[: len(_MAGIC)]):
        raise ProtocolError("the caller does not use Farandole's data protocol")
    if len(received) < _PREFIX.size:
        return None
    _, length = _PREFIX.unpack_from(received)
    end = _PREFIX.size + length
    if end > INTRODUCTION_LIMIT:
        raise ProtocolError(
            f"the caller announced an introduction of {length} bytes, at most {INTRODUCTION_LIMIT - _PREFIX.size} are "
            f"allowed"
        )
    if len(received) < end:
        return None
    if len(received) > end:
        raise ProtocolError("the caller sent data before it received the answer")
    try:
        return msgspec.msgpack.decode(received[_PREFIX.size :], type=Introduction)
    except ValueError as error:  # msgspec's own errors, and UnicodeDecodeError
        raise ProtocolError(f"not an introduction: {error}") from None


def acceptor_reply(key: bytes, introduction: Introduction, nonce: bytes) -> bytes:
    """Return the acceptor's answer: its nonce and its proof."""
    return nonce + _proof(key, "acceptor", introduction, nonce)


def dialer_proof(key: bytes, introduction: Introduction, reply: bytes) -> bytes | None:
    """Return the dialer's own proof once the acceptor's is verified; None when it is wrong."""
    nonce, theirs = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    if not hmac.compare_digest(theirs, _proof(key, "acceptor", introduction, nonce)):
        return None
    return _proof(key, "dialer", introduction, nonce)


def is_dialer_proved(key: bytes, introduction: Introduction, nonce: bytes, proof: bytes) -> bool:
    """Return whether the introduced dialer knows the data key; `nonce` is the acceptor's."""
    return hmac.compare_digest(proof, _proof(key, "dialer", introduction, nonce))


def _proof(key: bytes, role: str, introduction: Introduction, nonce: bytes) -> bytes:
    # One MessagePack value, so that the boundaries of the fields are part of the text.
    text = msgspec.msgpack.encode(("farandole data connection", role, introduction, nonce))
    return hmac.digest(key, text, "sha256")
