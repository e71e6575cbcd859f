"""The receiving end of point-to-point messages: verifies dialers, reads messages, and matches them with waiting calls.

point_to_point.py runs it in a thread.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from farandole.collectives.data_connections import Caller, DataListener
from farandole.collectives.handshake import (
    INTRODUCTION_LIMIT,
    PROOF_BYTES,
    Introduction,
    acceptor_reply,
    decode_introduction,
    is_dialer_proved,
)
from farandole.errors import ProtocolError
from farandole.membership import GenerationId

FRAME = struct.Struct("!24sQ")
"""The header of each message: its subject, padded with zeros, and the number of bytes that follow."""

SUBJECT_BYTES = 24

CHANNEL = 1 << 62
"""The channel of connections for point-to-point messages; no ring has it."""

_SLICE_S = 1.0  # the interval of checks for callers that do not proceed


class Incoming:
    """Serves all connections of one worker in one generation; for one thread.

    Args:
        ranks: Those of the workers that may dial, by their ids.
        deliver: Called with each message.
        lost: Called with the rank whose connection has ended.
    """

    def __init__(
        self,
        listener: DataListener,
        generation: GenerationId,
        worker: str,
        ranks: Mapping[str, int],
        key: bytes,
        deliver: Callable[[P2PMessage], None],
        lost: Callable[[int], None],
    ) -> None:
        self._listener, self._generation, self._worker = listener, generation, worker
        self._ranks, self._key, self._deliver, self._lost = ranks, key, deliver, lost
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._selector.register(listener.sock, selectors.EVENT_READ, self._welcome)

    def serve(self) -> None:
        """Serve until stop() is called; then every connection is closed."""
        try:
            while True:
                slice_s = _SLICE_S if self._listener.callers else None
                for key, _ in self._selector.select(slice_s):
                    if key.data is None:
                        return
                    key.data()
                self._drop_surplus()
        finally:
            for entry in list(self._selector.get_map().values()):
                if isinstance(entry.fileobj, socket.socket) and entry.fileobj is not self._listener.sock:
                    entry.fileobj.close()
            self._wake.close()
            self._selector.close()
            self._listener.close()

    def stop(self) -> None:
        """Stop serving. Callable from any thread."""
        try:
            self._wake.send(b"\0")
        except OSError:
            return  # stopped already

    def _welcome(self) -> None:
        while (caller := self._listener.accept()) is not None:
            self._selector.register(caller.sock, selectors.EVENT_READ, partial(self._read_caller, caller))
            self._drop_surplus()

    def _drop_surplus(self) -> None:
        for old in self._listener.surplus(len(self._ranks)):
            self._drop(old)

    def _read_caller(self, caller: Caller) -> None:
        """Read from a caller that has not proved its identity yet."""
        if caller not in self._listener.callers:
            return  # dropped by an earlier event of the same round
        limit = PROOF_BYTES if caller.nonce else INTRODUCTION_LIMIT + 1
        try:
            data = caller.sock.recv(limit - len(caller.received))
            if not data:
                raise ProtocolError("the caller closed the connection")
            caller.received += data
            if caller.introduction is None:
                self._receive_introduction(caller)
            elif len(caller.received) == PROOF_BYTES:
                self._receive_proof(caller, caller.introduction)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._drop(caller)

    def _receive_introduction(self, caller: Caller) -> None:
        introduction = decode_introduction(caller.received)
        if introduction is None:
            return
        expected = Introduction(self._generation, introduction.dialer, self._worker, b"", CHANNEL)
        if introduction.dialer not in self._ranks or not introduction.announces(expected):
            raise ProtocolError("the introduction is for another worker or generation")
        caller.introduction, caller.received = introduction, b""
        caller.sock.send(acceptor_reply(self._key, introduction, caller.make_nonce()))

    def _receive_proof(self, caller: Caller, introduction: Introduction) -> None:
        if not is_dialer_proved(self._key, introduction, caller.nonce, caller.received):
            raise ProtocolError("the proof of the caller is wrong")
        sock = self._listener.release(caller)
        reader = _Reader(sock, self._ranks[introduction.dialer], self._deliver)
        self._selector.modify(sock, selectors.EVENT_READ, partial(self._read, reader))

    def _read(self, reader: _Reader) -> None:
        if not reader.read():
            self._selector.unregister(reader.sock)
            reader.sock.close()
            self._lost(reader.source)

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.sock)
        self._listener.drop(caller)


class _Reader:
    """The reader of one connection, whose other end is proved to be rank `source`."""

    def __init__(self, sock: socket.socket, source: int, deliver: Callable[[P2PMessage], None]) -> None:
        self.sock, self.source, self._deliver = sock, source, deliver
        self._subject: bytes | None = None
        self._buffer = bytearray(FRAME.size)
        self._wanted = memoryview(self._buffer)

    def read(self) -> bool:
        """Read the available bytes. Return False when there will be no more."""
        try:
            count = self.sock.recv_into(self._wanted)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if count == 0:
            return False
        self._wanted = self._wanted[count:]
        while not self._wanted:
            self._next()
        return True

    def _next(self) -> None:
        if self._subject is None:
            self._subject, length = FRAME.unpack(self._buffer)
            self._begin(bytearray(length))
        else:
            self._deliver(P2PMessage(self.source, self._subject, self._buffer))
            self._subject = None
            self._begin(bytearray(FRAME.size))

    def _begin(self, buffer: bytearray) -> None:
        self._buffer, self._wanted = buffer, memoryview(buffer)


# Messages, and the calls that wait for them ---------------------------------------------------------------------------


class P2PMessage(NamedTuple):
    """A message between two ranks.

    Attributes:
        source: The global rank that sent it.
        subject: Agreed on by sender and receiver only: a group, and a tag or the number of an operation.
        content: Memory of its own.
    """

    source: int
    subject: bytes
    content: bytearray


class Expected:
    """A message that a call waits for: the first one of this subject from `source`, or from any rank.

    `message` is None until it has come.
    """

    def __init__(self, source: int | None, subject: bytes) -> None:
        self.source, self.subject = source, subject
        self.message: P2PMessage | None = None

    def matches(self, message: P2PMessage) -> bool:
        return self.subject == message.subject and self.source in (None, message.source)


class MessageQueue:
    """The messages of one rank.

    Messages of one source and subject are returned in the order of their arrival, to calls in the order in which they
    began to wait.
    """

    def __init__(self) -> None:
        self._unclaimed: deque[P2PMessage] = deque()
        self._expected: deque[Expected] = deque()

    def deliver(self, message: P2PMessage) -> None:
        for expected in self._expected:
            if expected.matches(message):
                expected.message = message
                self._expected.remove(expected)
                return
        self._unclaimed.append(message)

    def expect(self, source: int | None, subject: bytes) -> Expected:
        expected = Expected(source, subject)
        for message in self._unclaimed:
            if expected.matches(message):
                expected.message = message
                self._unclaimed.remove(message)
                return expected
        self._expected.append(expected)
        return expected
