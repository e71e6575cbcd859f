"""Frames on a byte stream and the messages inside them. Worker link, agent and coordinator use it. Pure.

A frame is a length of four bytes, big-endian, and that many bytes of payload. A message is MessagePack of one of the
types in wire/messages.py and wire/link_messages.py; any other content is refused.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from farandole.base.wire.control import ClientMessage, ToClient
from farandole.base.wire.function_call import CallReceived
from farandole.base.wire.link_messages import ToWorker, WorkerMessage
from farandole.base.wire.message import Message
from farandole.base.wire.messages import AgentDied, AgentMessage, GuardHello, ToAgent
from farandole.errors import ProtocolError

WORKER_FRAME_LIMIT = 1 << 20
"""The largest payload between a worker and its agent, in bytes; a longer traceback has to be cut."""

AGENT_FRAME_LIMIT = 16 << 20
"""The largest payload between an agent and the coordinator, in bytes: one START for each slot of a host."""

WORKER_MESSAGES: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
AGENT_MESSAGES: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
CLIENT_MESSAGES: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
TO_CLIENT: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
GUARD_MESSAGES: msgspec.msgpack.Decoder[AgentDied] = msgspec.msgpack.Decoder(AgentDied)
CALL_RECEIVED: msgspec.msgpack.Decoder[CallReceived] = msgspec.msgpack.Decoder(CallReceived)
DIALERS_MESSAGES: msgspec.msgpack.Decoder[AgentMessage | GuardHello | ClientMessage] = msgspec.msgpack.Decoder(
    AgentMessage | GuardHello | ClientMessage
)
"""Decodes the first message, which tells whether an agent, its guard or a command has dialed."""
TO_AGENT: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)

LENGTH = struct.Struct(">I")

T = TypeVar("T")


def encode(message: Message) -> bytes:
    """Return the payload that carries `message`."""
    return msgspec.msgpack.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Return the message in `payload`. Raises ProtocolError when it is none of the decoder's types."""
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:  # msgspec's own errors, UnicodeDecodeError, nested arrays
        raise ProtocolError(f"not a valid message ({len(payload)} bytes): {error}") from None


def frame(payload: bytes) -> bytes:
    """Return `payload` as a frame of the stream."""
    return LENGTH.pack(len(payload)) + payload


def frame_length(prefix: bytes, limit: int) -> int:
    """Return the length in the first four bytes of a frame. Raises ProtocolError above `limit`. The limit bounds the
    time and the memory that a peer can make this process spend."""
    (length,) = LENGTH.unpack(prefix)
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes was announced, at most {limit} are allowed here")
    return int(length)


class FrameBuffer:
    """Cuts a byte stream, fed in pieces of any size, into the payloads of its frames."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = bytearray()

    @property
    def missing(self) -> int:
        """The number of bytes that are missing until the next frame, or its length, is complete. Raises ProtocolError
        as feed() does."""
        if len(self._bytes) < LENGTH.size:
            return LENGTH.size - len(self._bytes)
        return LENGTH.size + frame_length(bytes(self._bytes[: LENGTH.size]), self.limit) - len(self._bytes)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes, in order. Raises ProtocolError as soon as a frame announces more
        than the limit; the stream cannot be decoded then and the connection must be closed."""
        self._bytes += data
        payloads = []
        start = 0
        while len(self._bytes) - start >= LENGTH.size:
            body = start + LENGTH.size
            end = body + frame_length(bytes(self._bytes[start:body]), self.limit)
            if end > len(self._bytes):
                break
            payloads.append(bytes(self._bytes[body:end]))
            start = end
        del self._bytes[:start]
        return payloads
