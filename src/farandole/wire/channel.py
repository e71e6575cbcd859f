"""An authenticated connection between an agent, or a command, and the coordinator, on asyncio. Both ends use it.

wire/authentication.py computes the proofs and is pure; this module moves its frames, under a deadline.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

from farandole.wire.authentication import HANDSHAKE_FRAME_LIMIT, MAC_BYTES, Handshake, Role, Session
from farandole.wire.codec import AGENT_FRAME_LIMIT, LENGTH, decode, encode, frame, frame_length
from farandole.wire.messages import Message
from farandole.wire.sockets import keep_alive

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
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: Session,
        decoder: msgspec.msgpack.Decoder[T],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._session, self._decoder = session, decoder

    def send(self, message: Message) -> None:
        """Pass `message` to the kernel now, or as soon as it accepts more.

        A broken connection raises no error here: `receive` raises it, in the one task that handles it.
        """
        if self._writer.is_closing():
            return
        self._writer.write(frame(self._session.seal(encode(message))))
        if self._writer.transport.get_write_buffer_size() > UNREAD_LIMIT:
            self._writer.transport.abort()

    @property
    def own_host(self) -> str:
        """The numeric address by which this side reaches the other."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self) -> T:
        """Return the next message.

        Raises ConnectionError when the other side is gone, and ProtocolError or AuthenticationError when it sent an
        invalid frame; the channel must be closed after any of them.
        """
        sealed = await _read_frame(self._reader, AGENT_FRAME_LIMIT + MAC_BYTES)
        return decode(self._decoder, self._session.open(sealed))

    def expecting(self, decoder: msgspec.msgpack.Decoder[U]) -> Channel[U]:
        """Return a channel on the same connection that receives other messages from now on; it replaces this object."""
        return Channel(self._reader, self._writer, self._session, decoder)

    def close(self) -> None:
        """Close the connection once all messages so far are sent. Idempotent."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection now; unsent messages are dropped. Idempotent."""
        self._writer.transport.abort()


class TokenRefused(ConnectionError):
    """The listener disconnected after this side's proof of the token."""


async def connect(
    host: str, port: int, token: bytes, job_id: str | None, decoder: msgspec.msgpack.Decoder[T]
) -> Channel[T]:
    """Dial a listener and prove the token to each other. With `job_id` None any job is accepted.

    Raises ConnectionError when there is no listener, or it disconnects (TokenRefused: as a listener does on a wrong
    token) or takes longer than the deadline; AuthenticationError when the listener does not know the token;
    ProtocolError when it uses another protocol or another version of it.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            return await _dial(host, port, token, job_id, decoder)
    except TimeoutError:
        raise ConnectionError(f"{host}:{port} did not answer within {HANDSHAKE_DEADLINE_S:g} s") from None


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: bytes,
    job_id: str,
    decoder: msgspec.msgpack.Decoder[T],
) -> Channel[T]:
    """Run the listener's side of `connect`, with the same errors. The connection is closed after any of them."""
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            session = await _shake_hands(reader, writer, Handshake(Role.LISTENER, token, job_id))
    except TimeoutError:
        writer.transport.abort()
        raise ConnectionError(f"no proof of the token within {HANDSHAKE_DEADLINE_S:g} s") from None
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(reader, writer, session, decoder)


async def _dial(
    host: str, port: int, token: bytes, job_id: str | None, decoder: msgspec.msgpack.Decoder[T]
) -> Channel[T]:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise _as_lost(error) from None
    try:
        session = await _shake_hands(reader, writer, Handshake(Role.DIALER, token, job_id))
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(reader, writer, session, decoder)


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handshake: Handshake) -> Session:
    sock = writer.get_extra_info("socket")
    # A message must not wait for the acknowledgement of the one before it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    payload = handshake.begin()
    while True:
        if payload is not None:
            writer.write(frame(payload))
        if handshake.session is not None:
            return handshake.session
        has_proved = payload is not None and not handshake.is_listener
        try:
            received = await _read_frame(reader, HANDSHAKE_FRAME_LIMIT)
        except ConnectionError as error:
            raise TokenRefused(f"{error} after this side had proved the token") if has_proved else error from None
        payload = handshake.receive(received)


async def _read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    try:
        prefix = await reader.readexactly(LENGTH.size)
        return await reader.readexactly(frame_length(prefix, limit))
    except asyncio.IncompleteReadError:
        raise ConnectionError("the other side closed the connection") from None
    except OSError as error:
        raise _as_lost(error) from None


def _as_lost(error: OSError) -> ConnectionError:
    """Convert the error to a ConnectionError.

    The kernel also reports "timed out" and "no route to host", which Python counts among other errors.
    """
    return error if isinstance(error, ConnectionError) else ConnectionError(str(error))
