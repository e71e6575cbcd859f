"""Messages between the ranks of one generation. process_group/ sends and receives with it; subgroups are made of it.

Each rank listens, in a thread, and accepts every message, whichever call it is for: a sender never waits for the
receiver to ask for a message, so no order of sends and receives can cause a deadlock. A connection carries messages in
one direction; it is dialed when the first one is sent.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import now_s
from farandole.base.membership import DataAddress, GenerationId
from farandole.base.wire.authentication import Introduction
from farandole.base.wire.sockets import can_write
from farandole.errors import FarandoleError, GenerationEnded, PeerLost, ProtocolError
from farandole.training.collectives.connection_pair import Broken, Wake
from farandole.training.collectives.data_listener import Caller, DataListener, Reception
from farandole.training.collectives.dialer import Dialer
from farandole.training.collectives.encrypted_socket import DataSocket, EncryptedSocket, has_input
from farandole.training.collectives.ring import OnBroken

_SLICE_S = 1.0
_END_OF_FILE = "end of file"

# The time for the receiver to open its PointToPoint, which it does when its process group is made.
_CONNECT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Endpoint:
    """A worker of the generation.

    Attributes:
        worker: Its id.
        address: The address at which the others reach it.
        memory: The same for all workers that can share memory with each other; None where this one shares none.
    """

    worker: str
    address: DataAddress
    memory: str | None = None


class PointToPoint:
    """Sends and receives messages for any number of threads, as long as each of them uses subjects of its own.

    Any failure ends it: the others see their connections end, and fail too.

    Args:
        on_broken: Called with (worker of the peer, "send" | "receive" | "connect", detail) before PeerLost is raised.
        check: Called at least once a second while a call waits; may raise.
    """

    def __init__(
        self,
        listener: DataListener,
        generation: GenerationId,
        key: bytes,
        rank: int,
        endpoints: Sequence[Endpoint],
        on_broken: OnBroken | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size, self.generation = rank, len(endpoints), generation.number
        self._listener, self._id, self._key = listener, generation, key
        self._on_broken, self._check = on_broken, check
        self._endpoints = endpoints
        self._messages = MessageQueue()
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        self._abort_reason: str | None = None
        self._next_check_s = now_s() + _SLICE_S
        self._outgoing: dict[int, DataSocket] = {}
        self._sending = [threading.Lock() for _ in endpoints]
        self._incoming: Incoming | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start to receive messages. Idempotent."""
        with self._changed:
            if self._incoming is not None or self._abort_reason is not None:
                return
            ranks = {each.worker: rank for rank, each in enumerate(self._endpoints)}
            worker = self._endpoints[self.rank].worker
            self._incoming = Incoming(self._listener, self._id, worker, ranks, self._key, self._deliver, self._lose)
            self._thread = threading.Thread(target=self._serve, name="farandole-p2p", daemon=True)
        self._thread.start()

    def send(self, target: int, subject: bytes, *parts: memoryview | bytes) -> None:
        """Send one message, the concatenation of the parts. Returns when the kernel or the receiver has it.

        Raises PeerLost and GenerationEnded.
        """
        self.raise_if_ended("send")
        self.open()
        if target == self.rank:
            self._deliver(P2PMessage(target, _filled(subject), bytearray(b"".join(bytes(part) for part in parts))))
            return
        views = [memoryview(part) for part in parts]
        header = FRAME.pack(subject, sum(view.nbytes for view in views))
        try:
            with self._sending[target]:
                sock = self._connection(target)
                for view in (memoryview(header), *views):
                    self._write(sock, view)
        except FarandoleError:
            raise
        except OSError as error:
            self._end_by_loss("send", target, str(error))
        except BaseException as error:
            self.abort(f"a message was interrupted by {type(error).__name__}")
            raise

    def expect(self, source: int | None, subject: bytes) -> Expected:
        """Register for the next message of this subject from `source`, or from any rank: for wait_for()."""
        self.raise_if_ended("receive")
        self.open()
        with self._changed:
            return self._messages.expect(source, _filled(subject))

    def wait_for(self, expected: Expected) -> P2PMessage:
        """Return the expected message. Raises PeerLost when it cannot come any more, and GenerationEnded."""
        self.arrives(expected, math.inf)
        assert expected.message is not None
        return expected.message

    def arrives(self, expected: Expected, timeout_s: float) -> bool:
        """Return whether the expected message comes within that time. Raises what wait_for() raises."""
        deadline_s = now_s() + timeout_s
        with WaitingForPeers():
            while True:
                with self._changed:
                    wait_s = max(0.0, min(_SLICE_S, deadline_s - now_s()))
                    self._changed.wait_for(
                        lambda: expected.message or self._abort_reason is not None or expected.source in self._gone,
                        wait_s,
                    )
                    if expected.message is not None:
                        return True
                    is_lost = expected.source in self._gone
                self.raise_if_ended("receive")
                if is_lost and expected.source is not None:
                    self._end_by_loss("receive", expected.source, _END_OF_FILE)
                if now_s() >= deadline_s:
                    return False
                if self._check is not None:
                    self._check()

    def receive(self, source: int, subject: bytes) -> bytearray:
        return self.wait_for(self.expect(source, subject)).content

    # For ranks that wait for each other in shared memory: subgroup_transport.py ----------------------------------

    def share_a_host(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks may share memory. All ranks of the generation get the same answer."""
        memories = {self._endpoints[rank].memory for rank in ranks}
        return len(memories) == 1 and None not in memories

    def interruption(self, sources: Sequence[int]) -> Broken | None:
        """Return the reason to stop waiting for these ranks, without waiting; None: there is none.

        Each of them must have sent a message before, by whose connection its end is noticed. Raises the errors of
        `check`.
        """
        if self._check is not None and now_s() >= self._next_check_s:
            self._next_check_s = now_s() + _SLICE_S
            self._check()
        with self._changed:
            if self._abort_reason is not None or not self._gone.isdisjoint(sources):
                return Broken("receive", self._abort_reason or _END_OF_FILE)
        return None

    def end_by_loss(self, op: str, sources: Sequence[int]) -> NoReturn:
        """Raise the error of such an interruption: PeerLost or GenerationEnded."""
        with self._changed:
            lost = next((rank for rank in sources if rank in self._gone), None)
        self.raise_if_ended(op)
        assert lost is not None, f"{op} was interrupted without a cause"
        self._end_by_loss(op, lost, _END_OF_FILE)

    def abort(self, reason: str) -> None:
        """Make waiting calls, and every later one, raise GenerationEnded. Callable from any thread."""
        with self._changed:
            if self._abort_reason is None:
                self._abort_reason = reason
            for sock in self._outgoing.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            if self._incoming is not None:
                self._incoming.stop()
            self._changed.notify_all()

    def close(self) -> None:
        """Make later calls raise GenerationEnded. Messages sent before still arrive. Idempotent."""
        with self._changed:
            if self._abort_reason is None:
                self._abort_reason = "its point-to-point connections were closed"
            incoming, thread = self._incoming, self._thread
        if incoming is None or thread is None:
            self._listener.close()
        else:
            incoming.stop()
            thread.join()
        with self._changed:
            for sock in self._outgoing.values():
                sock.close()
            self._outgoing.clear()
            self._changed.notify_all()

    def _serve(self) -> None:
        assert self._incoming is not None
        try:
            self._incoming.serve()
        except BaseException as error:
            self.abort(f"messages cannot be received any more: {type(error).__name__}: {error}")
            raise

    def _deliver(self, message: P2PMessage) -> None:
        with self._changed:
            self._messages.deliver(message)
            self._changed.notify_all()

    def _lose(self, source: int) -> None:
        with self._changed:
            self._gone.add(source)
            self._changed.notify_all()

    def _connection(self, target: int) -> DataSocket:
        sock = self._outgoing.get(target)
        if sock is None:
            sock = self._dial(target)
            with self._changed:
                self._outgoing[target] = sock
            self.raise_if_ended("send")
        return sock

    def _dial(self, target: int) -> DataSocket:
        to = self._endpoints[target]
        ours = Introduction(self._id, self._endpoints[self.rank].worker, to.worker, CHANNEL)
        deadline_s = now_s() + _CONNECT_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            own, tls = self._listener.address, self._listener.tls
            dialer = Dialer(selector, to.address, ours, self._key, own, tls)
            try:
                while not dialer.is_done:
                    self.raise_if_ended("connect")
                    if not dialer.run(_SLICE_S) and self._check is not None:
                        self._check()
                    if now_s() > deadline_s:
                        detail = f"no answer within {_CONNECT_TIMEOUT_S:g} s, at {dialer.failure}"
                        self._end_by_loss("connect", target, detail)
                return dialer.take()
            finally:
                dialer.close()

    def _write(self, sock: DataSocket, view: memoryview) -> None:
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                if not can_write(sock, _SLICE_S) and self._check is not None:
                    self._check()

    def _end_by_loss(self, op: str, rank: int, detail: str) -> NoReturn:
        self.raise_if_ended(op)
        error = PeerLost(op, self.generation, rank, detail)
        self.abort(str(error))
        if self._on_broken is not None:
            self._on_broken(self._endpoints[rank].worker, op, detail)
        raise error

    def raise_if_ended(self, op: str) -> None:
        """Raise GenerationEnded, in the name of the operation `op`, after abort() or close()."""
        if self._abort_reason is not None:
            raise GenerationEnded(op, self.generation, self._abort_reason)


def _filled(subject: bytes) -> bytes:
    assert len(subject) <= SUBJECT_BYTES, f"a subject of {len(subject)} bytes"
    return subject.ljust(SUBJECT_BYTES, b"\0")


# The receiving end ----------------------------------------------------------------------------------------------------

FRAME = struct.Struct("!24sQ")
"""The header of each message: its subject, padded with zeros, and the number of bytes that follow."""

SUBJECT_BYTES = 24

MESSAGE_LIMIT = 1 << 40
"""Bytes of the longest message."""

CHANNEL = 1 << 62
"""The channel of connections for point-to-point messages; no ring has it."""


class Incoming(Reception):
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
        super().__init__(selectors.DefaultSelector(), listener, dialers=len(ranks), is_limited=True)
        self._generation, self._worker = generation, worker
        self._ranks, self._key, self._deliver, self._lost = ranks, key, deliver, lost
        self._wake = Wake()
        self._selector.register(self._wake.descriptor, selectors.EVENT_READ, None)
        self._is_listening = True

    def serve(self) -> None:
        """Serve until stop() is called; then every connection is closed."""
        try:
            while True:
                pause_s = self._listener.budget.pause_s()
                self._listen(not pause_s)
                slice_s = pause_s or (_SLICE_S if self._listener.callers else None)
                for key, _ in self._selector.select(slice_s):
                    if key.data is None:
                        return
                    key.data()
                self.drop_surplus()
        finally:
            for entry in list(self._selector.get_map().values()):
                sock = entry.fileobj
                if isinstance(sock, socket.socket | EncryptedSocket) and sock not in self._listener.socks:
                    sock.close()
            self._wake.close()
            self._selector.close()
            self._listener.close()

    def stop(self) -> None:
        """Stop serving. Callable from any thread."""
        with contextlib.suppress(OSError):  # stopped already
            self._wake.set()

    def _listen(self, is_listening: bool) -> None:
        """Accept callers, or leave them in the kernel's queue: a crowd of strangers must not slow the training."""
        if is_listening == self._is_listening:
            return
        self._is_listening = is_listening
        for sock in self._listener.socks:
            if is_listening:
                self._selector.register(sock, selectors.EVENT_READ, self._welcome)
            else:
                self._selector.unregister(sock)

    def _judge(self, caller: Caller, introduction: Introduction) -> None:
        expected = Introduction(self._generation, introduction.dialer, self._worker, CHANNEL)
        if introduction.dialer not in self._ranks or introduction != expected:
            raise ProtocolError("the introduction is for another worker or generation")
        caller.answer(self._key)

    def _use(self, caller: Caller, proof: bytes) -> None:
        assert caller.introduction is not None
        caller.sock.send(proof)
        sock = self._listener.release(caller)
        reader = _Reader(sock, self._ranks[caller.introduction.dialer], self._deliver)
        self._selector.modify(sock, selectors.EVENT_READ, partial(self._read, reader))
        if has_input(sock):
            self._read(reader)

    def _read(self, reader: _Reader) -> None:
        if not reader.read():
            self._selector.unregister(reader.sock)
            reader.sock.close()
            self._lost(reader.source)


class _Reader:
    """The reader of one connection, whose other end is proved to be rank `source`."""

    def __init__(self, sock: DataSocket, source: int, deliver: Callable[[P2PMessage], None]) -> None:
        self.sock, self.source, self._deliver = sock, source, deliver
        self._subject: bytes | None = None
        self._buffer = bytearray(FRAME.size)
        self._wanted = memoryview(self._buffer)

    def read(self) -> bool:
        """Read the available bytes. Return False when there will be no more."""
        while True:
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
            if not has_input(self.sock):  # otherwise no event would tell of the rest
                return True

    def _next(self) -> None:
        if self._subject is None:
            self._subject, length = FRAME.unpack(self._buffer)
            if length > MESSAGE_LIMIT:
                raise ProtocolError(f"rank {self.source} announced a message of {length} bytes")
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
    """A message that a call waits for: the first one of this subject from `source`, or from any rank. `message` is None
    until it has come."""

    def __init__(self, source: int | None, subject: bytes) -> None:
        self.source, self.subject = source, subject
        self.message: P2PMessage | None = None

    def matches(self, message: P2PMessage) -> bool:
        return self.subject == message.subject and self.source in (None, message.source)


class MessageQueue:
    """The messages of one rank. Those of one source and subject are returned in the order of their arrival, to calls in
    the order in which they began to wait."""

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
