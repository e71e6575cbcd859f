"""Prove a key at both ends of a connection: the handshakes, and the MAC on each frame of an agent's connection.

The proofs are the same everywhere (Proofs); the order of the messages differs between control and data connections, for
the reasons given below. Pure: payloads of frames in, payloads of frames out (channel.py and ring_builder.py move them).
On a control connection, which an agent or a command opens:

    listener -> dialer   Challenge: version, nonce of the listener, id of the job
    dialer -> listener   Answer:    version, nonce of the dialer, proof of the token over both nonces
    listener -> dialer   Welcome:   the listener's own proof

A stranger learns only the job's id: the dialer proves the token first, and the proofs of the two roles differ, so that
neither can be sent back as the other. The session's keys, one for each direction, are derived from the token and both
nonces; no frame can be replayed, reordered, dropped from the middle, reflected or moved into another connection or job.
Frames are authenticated, not encrypted: an attacker on the path can read them (and cut the connection), so no key is
ever sent in one.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct

import msgspec

from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.membership import GenerationId
from farandole.wire.messages import PROTOCOL_VERSION

HANDSHAKE_FRAME_LIMIT = 128
"""The largest payload, in bytes, before the other side has proved the token."""

MAC_BYTES = 32
_NONCE_BYTES = 32
_MAGIC = b"farandol"
_BEGINNING = struct.Struct(">8sH")
_CHALLENGE = struct.Struct(f">8sH{_NONCE_BYTES}s")  # the job's id follows
_ANSWER = struct.Struct(f">8sH{_NONCE_BYTES}s{MAC_BYTES}s")


def new_token() -> bytes:
    """Return a random job token that only the processes of the job know: 32 bytes as hexadecimal digits, because
    an agent also reads it as a line of text."""
    return secrets.token_hex(32).encode()


SHORTEST_TOKEN = 32
"""Characters of the shortest token that is accepted: it must not be possible to guess one."""


def checked_token(text: bytes, where: str) -> bytes:
    """Return the token without surrounding blanks. Raises ConfigError for a token that is too short."""
    token = text.strip()
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"{where} has {len(token)} characters, a token needs at least {SHORTEST_TOKEN}")
    return token


def derive_key(secret: bytes, *parts: bytes) -> bytes:
    """Return a key of 32 bytes for exactly these parts; it says nothing about the secret, nor about other keys."""
    return _derive(secret, *parts)


def derive_data_key(token: bytes, generation: GenerationId) -> bytes:
    """Return the key (32 bytes) by which data connections of one generation prove their identity at both ends."""
    return _derive(token, b"data", msgspec.msgpack.encode(generation))


class Role(enum.Enum):
    """The role of one end of a connection."""

    DIALER = b"dialer"
    LISTENER = b"listener"

    @property
    def other(self) -> Role:
        return Role.LISTENER if self is Role.DIALER else Role.DIALER


class Proofs:
    """The proofs of one handshake: that each end knows a key. All handshakes use this class.

    Every value depends on the version of the protocol and on all fields that both ends have seen, each end's nonce
    among them. So nothing can be replayed, moved to a connection between others, or be of another version; and the
    proofs of the two roles differ, so that neither can be sent back as the other.

    Args:
        key: The job token, or a key that is derived from a secret.
        purpose: The kind of connection.
        fields: What both ends have seen.
    """

    def __init__(self, key: bytes, purpose: bytes, *fields: bytes) -> None:
        self._key, self._fields = key, (purpose, PROTOCOL_VERSION.to_bytes(2, "big"), *fields)

    def of(self, role: Role) -> bytes:
        """Return the proof of the end with this role."""
        return self._derive(b"proof of", role)

    def is_of(self, role: Role, proof: bytes) -> bool:
        """Return whether this is the proof of the end with this role."""
        return hmac.compare_digest(proof, self.of(role))

    def session(self, own: Role) -> Session:
        """Return the session of the end with the role `own`, with keys that only the two ends know."""
        return Session(self._derive(b"frames of", own), self._derive(b"frames of", own.other))

    def _derive(self, what: bytes, role: Role) -> bytes:
        return _derive(self._key, what, role.value, *self._fields)


class Session:
    """Seals and opens the frames of one authenticated connection."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    def seal(self, payload: bytes) -> bytes:
        """Return `payload` followed by its MAC."""
        mac = _frame_mac(self._send_key, self._sent, payload)
        self._sent += 1
        return payload + mac

    def open(self, sealed: bytes) -> bytes:
        """Return the payload of the next sealed frame.

        Raises AuthenticationError when the other side did not send exactly this frame next; the connection must be
        closed then.
        """
        payload, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _frame_mac(self._receive_key, self._received, payload)):
            raise AuthenticationError(f"frame {self._received} of the connection has a wrong MAC")
        self._received += 1
        return payload


class Handshake:
    """A dialer's or listener's end of the handshake.

    Send the result of `begin`, then pass received frames to `receive` and send its results, until `session` is set.

    `job_id` has at most 64 bytes; with None a dialer takes the job that the listener names.
    """

    def __init__(self, role: Role, token: bytes, job_id: str | None) -> None:
        self._role, self._token = role, token
        self._job_id = None if job_id is None else job_id.encode()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._proofs: Proofs | None = None
        self.session: Session | None = None

    @property
    def is_listener(self) -> bool:
        return self._role is Role.LISTENER

    def begin(self) -> bytes | None:
        """Return the listener's challenge; a dialer sends nothing before it has received one."""
        if self._role is Role.DIALER:
            return None
        assert self._job_id is not None, "a listener has a job"
        return _CHALLENGE.pack(_MAGIC, PROTOCOL_VERSION, self._nonce) + self._job_id

    def receive(self, payload: bytes) -> bytes | None:
        """Return the reply to a frame of the other side, or None.

        Raises ProtocolError for a frame that is not of a handshake or has another version, and AuthenticationError for
        a wrong proof.
        """
        if self.session is not None:
            raise ProtocolError("the handshake is over")
        if self._role is Role.LISTENER:
            return self._receive_answer(payload)
        if self._proofs is None:
            return self._receive_challenge(payload)
        self._accept(self._proofs, payload)
        return None

    def _receive_challenge(self, payload: bytes) -> bytes:
        (nonce,) = _unpack(_CHALLENGE, payload[: _CHALLENGE.size])
        if self._job_id is None:
            self._job_id = payload[_CHALLENGE.size :]
        self._proofs = self._proofs_of(listener=nonce, dialer=self._nonce)
        return _ANSWER.pack(_MAGIC, PROTOCOL_VERSION, self._nonce, self._proofs.of(self._role))

    def _receive_answer(self, payload: bytes) -> bytes:
        nonce, proof = _unpack(_ANSWER, payload)
        proofs = self._proofs_of(listener=self._nonce, dialer=nonce)
        self._accept(proofs, proof)
        return proofs.of(self._role)

    def _accept(self, proofs: Proofs, proof: bytes) -> None:
        if not proofs.is_of(self._role.other, proof):
            raise AuthenticationError(
                f"the {self._role.other.name.lower()} did not prove the token of job "
                f"{(self._job_id or b'').decode(errors='replace')}; both ends need the same job id and the same token"
            )
        self.session = proofs.session(self._role)

    def _proofs_of(self, *, listener: bytes, dialer: bytes) -> Proofs:
        return Proofs(self._token, b"control", self._job_id or b"", listener, dialer)


def _unpack(layout: struct.Struct, payload: bytes) -> tuple[bytes, ...]:
    """Return the fields after magic and version."""
    if len(payload) < _BEGINNING.size or not payload.startswith(_MAGIC):
        raise ProtocolError("the other side does not use Farandole's protocol")
    _, version = _BEGINNING.unpack_from(payload)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side uses version {version} of the protocol, this side version {PROTOCOL_VERSION}; "
            "install the same version of Farandole on all hosts"
        )
    if len(payload) != layout.size:
        raise ProtocolError("the other side does not use Farandole's protocol")
    return tuple(layout.unpack(payload)[2:])


def _derive(key: bytes, *parts: bytes) -> bytes:
    """Derive a key from exactly these parts. Each is prefixed by its length, so that no two lists are encoded alike."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, text, "sha256")


def _frame_mac(key: bytes, sequence: int, payload: bytes) -> bytes:
    return hmac.digest(key, sequence.to_bytes(8, "big") + payload, "sha256")


# The handshake of data connections ------------------------------------------------------------------------------------
#
# Both ends of a data connection prove their identity when it opens.
#
#     dialer   -> acceptor   introduction: generation, both workers, channel, nonce of the dialer
#     acceptor -> dialer     nonce of the acceptor, its proof
#     dialer   -> acceptor   its proof
#
# The proofs are those of the class Proofs, under the generation's data key, over all fields of the introduction and the
# acceptor's nonce. So a connection of another generation or between other workers proves nothing.
#
# There the listener speaks first and proves last, because a stranger must not get a proof of the job's token, which a
# person may have chosen. Here the dialer speaks first, because the acceptor waits for several dialers, and may send
# data one round trip after it dialed, which counts in each regroup.

NONCE_BYTES = 16
PROOF_BYTES = 32
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES
INTRODUCTION_LIMIT = 1024
"""The largest introduction in bytes, length included: it limits the memory that a stranger can occupy."""

_PREFIX = struct.Struct("!4sH")
_DATA_MAGIC = b"Frdd"


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
        return _PREFIX.pack(_DATA_MAGIC, len(body)) + body

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
    if not _DATA_MAGIC.startswith(received[: len(_DATA_MAGIC)]):
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
    except (ValueError, RecursionError) as error:  # msgspec's own errors, UnicodeDecodeError, nested arrays
        raise ProtocolError(f"not an introduction: {error}") from None


def acceptor_reply(key: bytes, introduction: Introduction, nonce: bytes) -> bytes:
    """Return the acceptor's answer: its nonce and its proof."""
    return nonce + _data_proofs(key, introduction, nonce).of(Role.LISTENER)


def dialer_proof(key: bytes, introduction: Introduction, reply: bytes) -> bytes | None:
    """Return the dialer's own proof once the acceptor's is verified; None when it is wrong."""
    nonce, theirs = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    proofs = _data_proofs(key, introduction, nonce)
    return proofs.of(Role.DIALER) if proofs.is_of(Role.LISTENER, theirs) else None


def is_dialer_proved(key: bytes, introduction: Introduction, nonce: bytes, proof: bytes) -> bool:
    """Return whether the introduced dialer knows the data key; `nonce` is the acceptor's."""
    return _data_proofs(key, introduction, nonce).is_of(Role.DIALER, proof)


def _data_proofs(key: bytes, introduction: Introduction, nonce: bytes) -> Proofs:
    return Proofs(key, b"data", msgspec.msgpack.encode(introduction), nonce)
