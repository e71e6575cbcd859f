"""An authenticated connection between an agent, or a command, and the coordinator, on asyncio. Both ends use it.

wire/authentication.py computes the proofs and is pure; this module moves its frames, under a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from farandole.base.wire.authentication import (
    MAC_BYTES,
    TLS_REFUSAL,
    DialerHandshake,
    ListenerHandshake,
    Purpose,
    Role,
    Session,
)
from farandole.base.wire.frames import AGENT_FRAME_LIMIT, LENGTH, decode, encode, frame, frame_length
from farandole.base.wire.message import Message
from farandole.base.wire.sockets import keep_alive
from farandole.errors import AuthenticationError, ProtocolError

if TYPE_CHECKING:
    from farandole.base.wire.encryption import Certificates, EncryptedStream

HANDSHAKE_DEADLINE_S = 5.0
"""The time, in seconds, in which a stranger must prove the token."""

UNREAD_LIMIT = 2 * AGENT_FRAME_LIMIT
"""The number of bytes that may wait for a peer that does not read; beyond it the connection is closed."""

T = TypeVar("T")
U = TypeVar("U")


class Channel(Generic[T]):
    """Sends messages and receives messages of type T. One task receives; sending never blocks."""

    def __init__(
        self,
        reader: _Reader,
        writer: asyncio.StreamWriter,
        session: Session,
        decoder: msgspec.msgpack.Decoder[T],
        stream: EncryptedStream | None = None,
    ) -> None:
        self._reader, self._writer, self._stream = reader, writer, stream
        self._session, self._decoder = session, decoder

    def send(self, message: Message) -> None:
        """Pass `message` to the kernel now, or as soon as it accepts more. A broken connection raises no error here:
        `receive` raises it, in the one task that handles it."""
        if self._writer.is_closing():
            return
        self._writer.write(self._sealed(message))
        if self._writer.transport.get_write_buffer_size() > UNREAD_LIMIT:
            self._writer.transport.abort()

    def hand_over(self, message: Message) -> tuple[int, bytes]:
        """Return the descriptor of the connection, and `message` as a frame for a process that has the descriptor, too,
        but not the token. This side must send nothing more."""
        descriptor: int = self._writer.get_extra_info("socket").fileno()
        return descriptor, self._sealed(message)

    def _sealed(self, message: Message) -> bytes:
        data = frame(self._session.seal(encode(message)))
        if self._stream is None:
            return data
        self._stream.write(data)
        return self._stream.outgoing()

    @property
    def version(self) -> int:
        """The version of the protocol that both ends use."""
        return self._session.version

    @property
    def own_host(self) -> str:
        """The numeric address by which this side reaches the other."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_host(self) -> str:
        """The numeric address of the other side, as this side sees it."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def peer_port(self) -> int:
        """The port of the other side, as this side sees it."""
        return int(self._writer.get_extra_info("peername")[1])

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
        return self._writer.transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Wait until the kernel has accepted most of what was sent. Raises ConnectionError when the connection is
        gone."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise _as_lost(error) from None

    async def receive(self) -> T:
        """Return the next message. Raises ConnectionError when the other side is gone, and ProtocolError or
        AuthenticationError when it sent an invalid frame; the channel must be closed after any of them."""
        try:
            prefix = await self._reader.readexactly(LENGTH.size)
            sealed = await self._reader.readexactly(frame_length(prefix, AGENT_FRAME_LIMIT + MAC_BYTES))
        except asyncio.IncompleteReadError:
            raise ConnectionError("the other side closed the connection") from None
        except OSError as error:
            raise _as_lost(error) from None
        return decode(self._decoder, self._session.open(sealed))

    def expecting(self, decoder: msgspec.msgpack.Decoder[U]) -> Channel[U]:
        """Return a channel on the same connection that receives other messages from now on; it replaces this object."""
        return Channel(self._reader, self._writer, self._session, decoder, self._stream)

    def close(self) -> None:
        """Close the connection once all messages so far are sent. Idempotent."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection now; unsent messages are dropped. Idempotent."""
        self._writer.transport.abort()


class TokenRefused(ConnectionError):
    """The listener disconnected after this side's proof of the token."""


async def connect(
    host: str,
    port: int,
    token: bytes,
    job_id: str | None,
    decoder: msgspec.msgpack.Decoder[T],
    tls: Certificates | None = None,
) -> Channel[T]:
    """Dial a listener and prove the token to each other. With `job_id` None any job is accepted, with `tls` the
    connection is encrypted.

    Raises ConnectionError when there is no listener, or it disconnects (TokenRefused: as a listener does on a wrong
    token) or takes longer than the deadline; AuthenticationError when the listener does not know the token, or one of
    the two certificates is refused; ProtocolError when it uses another protocol or another version of it.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            try:
                connected = await _connected(host, port)
            except OSError as error:
                raise _as_lost(error) from None
            try:
                return await _channel(connected, _End(Role.DIALER, token, job_id), decoder, tls)
            except BaseException:
                connected.close()
                raise
    except TimeoutError:
        raise ConnectionError(f"{host}:{port} did not answer within {HANDSHAKE_DEADLINE_S:g} s") from None


async def accept(
    connected: socket.socket,
    token: bytes,
    job_id: str,
    decoder: msgspec.msgpack.Decoder[T],
    tls: Certificates | None = None,
) -> Channel[T]:
    """Run the listener's side of `connect`, with the same errors. The connection is closed after any of them."""
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            return await _channel(connected, _End(Role.LISTENER, token, job_id), decoder, tls)
    except TimeoutError:
        connected.close()
        raise ConnectionError(f"no proof of the token within {HANDSHAKE_DEADLINE_S:g} s") from None
    except OSError as error:
        connected.close()
        raise _as_lost(error) from None
    except BaseException:
        connected.close()
        raise


async def _connected(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the first address of the host that accepts. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connected = socket.socket(family, kind, protocol)
        connected.setblocking(False)
        try:
            await loop.sock_connect(connected, address)
        except OSError as error:
            connected.close()
            failure = error
        except BaseException:
            connected.close()
            raise
        else:
            return connected
    raise failure


async def _channel(
    connected: socket.socket, end: _End, decoder: msgspec.msgpack.Decoder[T], tls: Certificates | None
) -> Channel[T]:
    with contextlib.suppress(OSError):  # the other side is gone already, which the first read or write reports
        # A message must not wait for the acknowledgement of the one before it.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connected)
    if tls is None:
        session = await _shake_hands(_Unproved(connected), end)
        reader, writer = await asyncio.open_connection(sock=connected)
        return Channel(reader, writer, session, decoder)
    from farandole.base.wire.encryption import EncryptedStream, EncryptionFailed

    stream = EncryptedStream(tls.context(end.role), end.role)
    unproved = _UnprovedEncrypted(connected, stream)
    try:
        await unproved.encrypt()
        session = await _shake_hands(unproved, end)
    except EncryptionFailed as error:
        raise AuthenticationError(str(error)) from None
    reader, writer = await asyncio.open_connection(sock=connected)
    return Channel(_EncryptedReader(reader, stream), writer, session, decoder, stream)


class _End(NamedTuple):
    """What one end of a control connection proves. With `job_id` None a dialer takes any job."""

    role: Role
    token: bytes
    job_id: str | None


async def _shake_hands(connected: _Unproved, end: _End) -> Session:
    job = (end.job_id or "").encode()
    if end.role is Role.LISTENER:
        return await _answer_dialer(connected, ListenerHandshake(Purpose.CONTROL), end.token, job)
    handshake = DialerHandshake(Purpose.CONTROL, end.token, job)
    outgoing = handshake.begin()
    while True:
        try:
            await connected.send(outgoing)
            if handshake.session is not None:
                return handshake.session
            received = await connected.receive(handshake.missing)
        except OSError as error:
            if handshake.has_proved:
                raise TokenRefused(f"{error} after this side had proved the token") from None
            raise _as_lost(error) from None
        outgoing = handshake.feed(received)


async def _answer_dialer(connected: _Unproved, handshake: ListenerHandshake, token: bytes, job: bytes) -> Session:
    try:
        while handshake.subject is None:
            handshake.feed(await connected.receive(handshake.missing))
    except ProtocolError:
        await connected.refuse(TLS_REFUSAL)  # a dialer that uses TLS is told at once, and others understand nothing
        raise
    if handshake.subject not in (b"", job):
        raise AuthenticationError(f"the dialer did not prove the token of job {job.decode()}: it wants another one")
    await connected.send(handshake.challenge(token, job))
    try:
        outgoing = b""
        while handshake.session is None:
            outgoing = handshake.feed(await connected.receive(handshake.missing))
        await connected.send(outgoing)
    except ConnectionError:
        handshake.check_version()  # the reason, if they differ
        raise
    return handshake.session


class _Unproved:
    """A connection during the handshake, on the socket itself: asyncio's streams would read, and keep, 256 kB from a
    stranger at once (CPython 3.11, Lib/asyncio/selector_events.py, max_size)."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._loop = connected, asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def refuse(self, data: bytes) -> None:
        """Send the reason why the connection is closed, best effort."""
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self._socket, data)
            # With unread bytes, close() would reset the connection, and the reason be lost (RFC 1122, 4.2.2.13).
            self._socket.recv(_TLS_PIECE)

    async def receive(self, most: int) -> bytes:
        """Return at least one byte, and at most that many. Raises ConnectionError at the end."""
        part = await self._loop.sock_recv(self._socket, most)
        if not part:
            raise ConnectionError("the other side closed the connection")
        return part


_TLS_PIECE = 4096
_TLS_HANDSHAKE_LIMIT = 16 << 10  # our own certificates need 2 kB


class _UnprovedEncrypted(_Unproved):
    """The same over TLS: `await encrypt()` first."""

    def __init__(self, connected: socket.socket, stream: EncryptedStream) -> None:
        super().__init__(connected)
        self._stream, self._left = stream, _TLS_HANDSHAKE_LIMIT

    async def encrypt(self) -> None:
        """Run the handshake of TLS. Raises EncryptionFailed."""
        from farandole.base.wire.encryption import EncryptionFailed

        try:
            while not self._stream.handshake():
                await self._send_outgoing()
                await self._feed()
        except EncryptionFailed:
            await self.refuse(self._stream.outgoing() or TLS_REFUSAL)
            raise
        await self._send_outgoing()

    async def send(self, data: bytes) -> None:
        self._stream.write(data)
        await self._send_outgoing()

    async def receive(self, most: int) -> bytes:
        data = bytearray(most)
        while not (count := self._stream.read_into(memoryview(data))):
            await self._feed()
        return bytes(data[:count])

    async def _send_outgoing(self) -> None:
        await super().send(self._stream.outgoing())

    async def _feed(self) -> None:
        data = await super().receive(_TLS_PIECE)
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError(f"more than {_TLS_HANDSHAKE_LIMIT} bytes came before the proof of the token")
        self._stream.feed(data)


class _Reader(Protocol):
    """The part of asyncio.StreamReader that a Channel needs."""

    async def readexactly(self, n: int) -> bytes: ...


class _EncryptedReader:
    """Decrypts what a reader receives."""

    def __init__(self, reader: asyncio.StreamReader, stream: EncryptedStream) -> None:
        self._reader, self._stream = reader, stream
        self._decrypted = bytearray()  # kept when a read is cancelled

    async def readexactly(self, n: int) -> bytes:
        """Return exactly `n` bytes. Raises IncompleteReadError at the end, and OSError."""
        piece = memoryview(bytearray(_DECRYPTED_AT_ONCE))
        while True:
            while len(self._decrypted) < n and (count := self._stream.read_into(piece)):
                self._decrypted += piece[:count]
            if len(self._decrypted) >= n:
                data = bytes(self._decrypted[:n])
                del self._decrypted[:n]
                return data
            received = await self._reader.read(_RECEIVED_AT_ONCE)
            if not received:
                raise asyncio.IncompleteReadError(bytes(self._decrypted), n)
            self._stream.feed(received)


_DECRYPTED_AT_ONCE, _RECEIVED_AT_ONCE = 16 << 10, 1 << 18


def _as_lost(error: OSError) -> ConnectionError:
    """Convert the error to a ConnectionError. The kernel also reports "timed out" and "no route to host", which Python
    counts among other errors."""
    return error if isinstance(error, ConnectionError) else ConnectionError(str(error))
