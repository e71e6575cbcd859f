"""Prove a key at both ends of a connection: the handshake of all connections between processes that are not parent and
child, and the MAC on each frame of an agent's connection.

Pure: bytes in, bytes out. channel.py moves them for control connections (an agent or a command dials the coordinator),
collectives/ for data connections (a worker dials another one). The order is the same:

    dialer   -> listener   hello:      its newest version, nonce of the dialer, subject: whom it wants to reach
    listener -> dialer     challenge:  the version to be used, nonce of the listener, its name
    dialer   -> listener   proof of the dialer
    listener -> dialer     proof of the listener

The dialer speaks first: a listener keeps nothing for those that say nothing, it can tell from the subject which key
counts, and TLS begins in the same way. The dialer also proves first: a stranger must not get a proof of the token,
which a person may have chosen. A stranger learns only the listener's name, the id of the job. The proofs of the two
roles differ, so that neither can be sent back as the other.

The version to be used is the newest one that both ends speak: the dialer's newest, or the listener's if that is older.
Both versions are part of each proof. So nobody on the path can make two ends use an older version than they would
otherwise: an offer or an answer that was changed on the way ends the handshake.

On a control connection the session's keys follow, one for each direction, derived from the token and both nonces; no
frame can be replayed, reordered, dropped from the middle, reflected or moved into another connection or job. Without
TLS (encryption.py) frames are authenticated, not encrypted: an attacker on the path can read them (and cut the
connection), so no key is ever sent in one.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct

import msgspec

from farandole.base.membership import GenerationId
from farandole.base.wire.message import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from farandole.errors import AuthenticationError, ConfigError, ProtocolError

MAC_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
SUBJECT_LIMIT = 1024
"""Bytes of the longest subject: it limits the memory that a stranger can occupy."""

_MAGIC = b"farandol"
_LENGTH = struct.Struct(">I")  # of a message, which follows
_GREETING = struct.Struct(f">8sH{NONCE_BYTES}s")  # the subject or the name follows

TLS_RECORD, TLS_ALERT = b"\x16\x03", b"\x15\x03"
"""The first bytes of a TLS connection from a dialer, and of a refusal (RFC 8446, section 5.1)."""

TLS_REFUSAL = TLS_ALERT + b"\x03\x00\x02\x02\x46"
"""A fatal alert: protocol_version. It tells a dialer that only one of the two ends uses TLS."""


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
    # Each part is prefixed by its length, so that no two lists are encoded alike.
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, text, "sha256")


def derive_data_key(token: bytes, generation: GenerationId) -> bytes:
    """Return the key (32 bytes) by which data connections of one generation prove their identity at both ends."""
    return derive_key(token, b"data", msgspec.msgpack.encode(generation))


class Role(enum.Enum):
    """The role of one end of a connection."""

    DIALER = b"dialer"
    LISTENER = b"listener"

    @property
    def other(self) -> Role:
        return Role.LISTENER if self is Role.DIALER else Role.DIALER


class Proofs:
    """The proofs of one handshake: that each end knows the key, the job token or one that is derived from a secret.

    Every value depends on the purpose and on all fields that both ends have seen, each end's nonce and the versions of
    the protocol among them. So nothing can be replayed, moved to a connection between others, or be of another version.
    """

    def __init__(self, key: bytes, purpose: bytes, *fields: bytes) -> None:
        self._key, self._fields = key, (purpose, *fields)

    def of(self, role: Role) -> bytes:
        """Return the proof of the end with this role."""
        return self._derive(b"proof of", role)

    def is_of(self, role: Role, proof: bytes) -> bool:
        """Return whether this is the proof of the end with this role."""
        return hmac.compare_digest(proof, self.of(role))

    def session(self, own: Role, version: int = PROTOCOL_VERSION) -> Session:
        """Return the session of the end with the role `own`, with keys that only the two ends know."""
        return Session(self._derive(b"frames of", own), self._derive(b"frames of", own.other), version)

    def _derive(self, what: bytes, role: Role) -> bytes:
        return derive_key(self._key, what, role.value, *self._fields)


class Session:
    """Seals and opens the frames of one authenticated connection. `version`: of the protocol on it."""

    def __init__(self, send_key: bytes, receive_key: bytes, version: int = PROTOCOL_VERSION) -> None:
        self._send_key, self._receive_key, self.version = send_key, receive_key, version
        self._sent = self._received = 0

    def seal(self, payload: bytes) -> bytes:
        """Return `payload` followed by its MAC."""
        mac = _frame_mac(self._send_key, self._sent, payload)
        self._sent += 1
        return payload + mac

    def open(self, sealed: bytes) -> bytes:
        """Return the payload of the next sealed frame. Raises AuthenticationError when the other side did not send
        exactly this frame next; the connection must be closed then."""
        payload, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _frame_mac(self._receive_key, self._received, payload)):
            raise AuthenticationError(f"frame {self._received} of the connection has a wrong MAC")
        self._received += 1
        return payload


class Purpose(enum.Enum):
    """The kinds of connections. The key of one proves nothing on another."""

    CONTROL = b"control"
    DATA = b"data"


class _Handshake:
    """One end of the handshake. Pass at most `missing` received bytes at a time to feed(), and send its result, until
    `session` is set.

    Attributes:
        version: That of the protocol that both ends use, once `session` is set.

    feed() raises ProtocolError for bytes that are not of a handshake or are of another version, and AuthenticationError
    for a wrong proof. The connection must be closed then.
    """

    role: Role

    def __init__(self, purpose: Purpose) -> None:
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._received = b""
        self._limit = _GREETING.size + SUBJECT_LIMIT
        self._proofs: Proofs | None = None
        self.version = PROTOCOL_VERSION
        self.session: Session | None = None

    @property
    def missing(self) -> int:
        """The number of bytes until the next message, or its length, is complete; what follows is not the handshake's.
        Raises ProtocolError as feed() does."""
        if len(self._received) < _LENGTH.size:
            return _LENGTH.size - len(self._received)
        return _LENGTH.size + self._length(self._received) - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take received bytes, and return the bytes to be sent; often none."""
        self._received += data
        if not self.session and len(self._received) >= _LENGTH.size and self.missing <= 0:
            message, self._received = self._received[_LENGTH.size :], b""
            return self._receive(message)
        if self.session is not None:
            raise ProtocolError("the handshake is over")
        return b""

    def _receive(self, message: bytes) -> bytes:
        raise NotImplementedError

    def _length(self, received: bytes) -> int:
        """Return the announced length. Raises ProtocolError for one that is not allowed."""
        (length,) = _LENGTH.unpack_from(received)
        if length > self._limit:
            other = self.role.other.name.lower()
            if received.startswith((TLS_RECORD, TLS_ALERT)):
                raise ProtocolError(f"the {other} uses TLS, and this side does not: give --tls DIR at both ends")
            raise ProtocolError(
                f"the {other} does not use Farandole's protocol: it announced {length} bytes, and at most "
                f"{self._limit} are allowed here"
            )
        return int(length)

    def _greeting(self, text: bytes) -> bytes:
        return _framed(_GREETING.pack(_MAGIC, self.version, self._nonce) + text)

    def _begin_proofs(
        self, key: bytes, offered: int, subject: bytes, name: bytes, dialer: bytes, listener: bytes
    ) -> Proofs:
        versions = (each.to_bytes(2, "big") for each in (offered, self.version))
        self._proofs = Proofs(key, self._purpose.value, *versions, subject, name, dialer, listener)
        self._limit = PROOF_BYTES
        return self._proofs

    def _accept(self, proofs: Proofs, proof: bytes, name: bytes) -> None:
        if not proofs.is_of(self.role.other, proof):
            of = f" of job {name.decode(errors='replace')}" if name else ""
            raise AuthenticationError(
                f"the {self.role.other.name.lower()} did not prove the token{of}; both ends need the same job id and "
                "the same token"
            )
        self.session = proofs.session(self.role, self.version)


class DialerHandshake(_Handshake):
    """The dialer's end. Send begin() first. `subject`: whom it wants to reach: the id of a job, or an encoded
    Introduction; empty: any job."""

    role = Role.DIALER

    def __init__(self, purpose: Purpose, key: bytes, subject: bytes) -> None:
        super().__init__(purpose)
        self._key, self._subject, self._name = key, subject, b""

    @property
    def has_proved(self) -> bool:
        """True when this end has returned its proof."""
        return self._proofs is not None

    def begin(self) -> bytes:
        """Return the first bytes to be sent. Raises ValueError for a subject that is too long."""
        if len(self._subject) > SUBJECT_LIMIT:
            raise ValueError(f"the subject has {len(self._subject)} bytes, at most {SUBJECT_LIMIT} are allowed")
        return self._greeting(self._subject)

    def _receive(self, message: bytes) -> bytes:
        if self._proofs is not None:
            self._accept(self._proofs, message, self._name)
            return b""
        self.version, nonce, self._name = _parse_greeting(message)
        _check_version(self.version)
        proofs = self._begin_proofs(self._key, PROTOCOL_VERSION, self._subject, self._name, self._nonce, nonce)
        return _framed(proofs.of(self.role))


class ListenerHandshake(_Handshake):
    """The listener's end. When `subject` is set, call challenge() and send its result, or close the connection.

    Attributes:
        subject: Whom the dialer wants to reach, which is not proved yet; None: it has not said it completely.
    """

    role = Role.LISTENER

    def __init__(self, purpose: Purpose) -> None:
        super().__init__(purpose)
        self.subject: bytes | None = None
        self._dialers_version, self._dialers_nonce, self._name = PROTOCOL_VERSION, b"", b""

    def could_go_on(self, data: bytes) -> bool:
        """Return whether the received bytes and these may be the hello of a dialer that waits for its answer."""
        received = self._received + data
        if self.subject is not None or len(received) < _LENGTH.size:
            return self.subject is None
        try:
            left = _LENGTH.size + self._length(received) - len(received)
            if left == 0:
                _parse_greeting(received[_LENGTH.size :])
        except ProtocolError:
            return False
        beginning = received[_LENGTH.size :][: len(_MAGIC)]
        return left >= 0 and _MAGIC.startswith(beginning)

    def challenge(self, key: bytes, name: bytes = b"") -> bytes:
        """Return the challenge for the dialer, with this side's name. One that is too old gets it, too: it says then
        which versions differ."""
        assert self.subject is not None, "the dialer has not said whom it wants to reach"
        self._name = name
        if self._dialers_version >= OLDEST_PROTOCOL_VERSION:
            self.version = min(self._dialers_version, PROTOCOL_VERSION)
        self._begin_proofs(key, self._dialers_version, self.subject, name, self._dialers_nonce, self._nonce)
        return self._greeting(name)

    def check_version(self) -> None:
        """Raise ProtocolError when this side does not speak a version that the dialer speaks."""
        _check_version(min(self._dialers_version, PROTOCOL_VERSION))

    def _receive(self, message: bytes) -> bytes:
        if self._proofs is not None:
            self.check_version()
            self._accept(self._proofs, message, self._name)
            return _framed(self._proofs.of(self.role))
        if self.subject is not None:
            raise ProtocolError("the dialer sent more before it was answered")
        self._dialers_version, self._dialers_nonce, self.subject = _parse_greeting(message)
        return b""


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _parse_greeting(message: bytes) -> tuple[int, bytes, bytes]:
    """Return version, nonce, and the subject or name."""
    if len(message) < _GREETING.size or not message.startswith(_MAGIC):
        raise ProtocolError("the other side does not use Farandole's protocol")
    _, version, nonce = _GREETING.unpack_from(message)
    return version, nonce, message[_GREETING.size :]


def _check_version(version: int) -> None:
    if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side uses version {version} of the protocol, this side {spoken_versions()}; "
            "install the same version of Farandole on all hosts"
        )


def spoken_versions() -> str:
    """Return the versions of the protocol that this release speaks, for messages."""
    if OLDEST_PROTOCOL_VERSION == PROTOCOL_VERSION:
        return f"version {PROTOCOL_VERSION}"
    return f"versions {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"


def _frame_mac(key: bytes, sequence: int, payload: bytes) -> bytes:
    return hmac.digest(key, sequence.to_bytes(8, "big") + payload, "sha256")


# The subject of data connections --------------------------------------------------------------------------------------


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """The generation, workers and channel of a data connection. Worker ids are those of the job."""

    generation: GenerationId
    dialer: str
    acceptor: str
    channel: int = 0

    def encode(self) -> bytes:
        """Return the subject of the handshake. Raises ValueError when the ids are too long to introduce."""
        subject = msgspec.msgpack.encode(self)
        if len(subject) > SUBJECT_LIMIT:
            raise ValueError(f"worker ids {self.dialer!r} and {self.acceptor!r} are too long for an introduction")
        return subject


def decode_introduction(subject: bytes) -> Introduction:
    """Return the introduction in the subject of a handshake. Raises ProtocolError when there is none."""
    try:
        return msgspec.msgpack.decode(subject, type=Introduction)
    except (ValueError, RecursionError) as error:  # msgspec's own errors, UnicodeDecodeError, nested arrays
        raise ProtocolError(f"not an introduction: {error}") from None
