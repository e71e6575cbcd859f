"""Messages between the ranks of one generation. process_group/ sends and receives with it; subgroups are made of it.

Each rank listens, in a thread, and accepts every message, whichever call it is for: a sender never waits for the
receiver to ask for a message, so no order of sends and receives can cause a deadlock. A connection carries messages in
one direction; it is dialed when the first one is sent.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farandole.clock import now_s
from farandole.collectives.data_connections import DataListener, Dialer
from farandole.collectives.handshake import Introduction
from farandole.collectives.p2p.incoming import (
    CHANNEL,
    FRAME,
    SUBJECT_BYTES,
    Expected,
    Incoming,
    MessageQueue,
    P2PMessage,
)
from farandole.collectives.ring import OnBroken
from farandole.errors import FarandoleError, GenerationEnded, PeerLost
from farandole.liveness.status_reporting import WaitingForPeers
from farandole.membership import Address, GenerationId
from farandole.wire.sockets import can_write

_SLICE_S = 1.0

# The time for the receiver to open its PointToPoint, which it does when its process group is made.
_CONNECT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Endpoint:
    """A worker of the generation, with the address at which the others reach it."""

    worker: str
    address: Address


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
        self._outgoing: dict[int, socket.socket] = {}
        self._sending = [threading.Lock() for _ in endpoints]
        self._incoming: Incoming | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """The address at which the others reach this worker."""
        return self._listener.address

    def open(self) -> None:
        """Start to receive messages. Idempotent."""
        with self._changed:
            if self._incoming is not None or self._abort_reason is not None:
                return
            ranks = {each.worker: rank for rank, each in enumerate(self._endpoints)}
            self._incoming = Incoming(
                self._listener,
                self._id,
                self._endpoints[self.rank].worker,
                ranks,
                self._key,
                self._deliver,
                self._lose,
            )
            self._thread = threading.Thread(target=self._serve, name="farandole-p2p", daemon=True)
        self._thread.start()

    def send(self, target: int, subject: bytes, *parts: memoryview | bytes) -> None:
        """Send one message, the concatenation of the parts. Returns when the kernel or the receiver has it.

        Raises PeerLost and GenerationEnded.
        """
        self._raise_if_ended("send")
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
        self._raise_if_ended("receive")
        self.open()
        with self._changed:
            return self._messages.expect(source, _filled(subject))

    def wait_for(self, expected: Expected) -> P2PMessage:
        """Return the expected message. Raises PeerLost when it cannot come any more, and GenerationEnded."""
        with WaitingForPeers():
            return self._wait_for(expected)

    def _wait_for(self, expected: Expected) -> P2PMessage:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_decided(expected), _SLICE_S)
                if expected.message is not None:
                    return expected.message
                is_lost = expected.source in self._gone
            self._raise_if_ended("receive")
            if is_lost and expected.source is not None:
                self._end_by_loss("receive", expected.source, "end of file")
            if self._check is not None:
                self._check()

    def receive(self, source: int, subject: bytes) -> bytearray:
        return self.wait_for(self.expect(source, subject)).content

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

    def _is_decided(self, expected: Expected) -> bool:
        return expected.message is not None or self._abort_reason is not None or expected.source in self._gone

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

    def _connection(self, target: int) -> socket.socket:
        sock = self._outgoing.get(target)
        if sock is None:
            sock = self._dial(target)
            with self._changed:
                self._outgoing[target] = sock
            self._raise_if_ended("send")
        return sock

    def _dial(self, target: int) -> socket.socket:
        to = self._endpoints[target]
        ours = Introduction(self._id, self._endpoints[self.rank].worker, to.worker, b"", CHANNEL)
        deadline_s = now_s() + _CONNECT_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            dialer = Dialer(selector, to.address, ours, self._key)
            try:
                while not dialer.is_done:
                    self._raise_if_ended("connect")
                    dialer.dial_if_due()
                    wait_s = _SLICE_S if dialer.retry_at_s is None else max(0.0, dialer.retry_at_s - now_s())
                    events = selector.select(min(wait_s, _SLICE_S))
                    for key, _ in events:
                        key.data()
                    if not events and self._check is not None:
                        self._check()
                    if now_s() > deadline_s:
                        self._end_by_loss("connect", target, f"no answer within {_CONNECT_TIMEOUT_S:g} s")
                return dialer.take()
            finally:
                dialer.close()

    def _write(self, sock: socket.socket, view: memoryview) -> None:
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                if not can_write(sock, _SLICE_S) and self._check is not None:
                    self._check()

    def _end_by_loss(self, op: str, rank: int, detail: str) -> None:
        self._raise_if_ended(op)
        error = PeerLost(op, self.generation, rank, detail)
        self.abort(str(error))
        if self._on_broken is not None:
            self._on_broken(self._endpoints[rank].worker, op, detail)
        raise error

    def _raise_if_ended(self, op: str) -> None:
        if self._abort_reason is not None:
            raise GenerationEnded(op, self.generation, self._abort_reason)


def _filled(subject: bytes) -> bytes:
    assert len(subject) <= SUBJECT_BYTES, f"a subject of {len(subject)} bytes"
    return subject.ljust(SUBJECT_BYTES, b"\0")
