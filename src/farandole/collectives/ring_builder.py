"""Build a working ring from START: dial the next rank, accept the previous one, prove both. worker/ uses it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

from farandole.clock import now_s
from farandole.collectives.acceptor import Acceptor
from farandole.collectives.alone import AloneTransport
from farandole.collectives.dialer import Dialer
from farandole.collectives.handshake import Introduction
from farandole.collectives.listener import DataListener
from farandole.collectives.ring import OnBroken, RingTransport
from farandole.collectives.transport import Transport
from farandole.collectives.worker_cores import may_spin
from farandole.errors import GenerationEnded, PeerLost, ProtocolError
from farandole.fork_safety import close_at_fork
from farandole.membership import Peer
from farandole.messages import Start

_SLICE_S = 1.0
_SHORTEST_KEY_BYTES = 16


class RingBuilder:
    """Builds the transport of one generation, once; another thread may abort it meanwhile and afterwards.

    Args:
        listener: This worker's listener; the coordinator has told its address to the previous rank.
        start: Names this worker's neighbours, and holds the key that proves their identity.
        worker: The id of this worker.
        timeout_s: The time limit of build(), in seconds.
        on_broken: Called with (worker of the peer, direction, detail) when a connection cannot be made, or fails later.
        check: Called at least once a second while build() or a collective waits; may raise.
        channel: Distinguishes the rings of one generation. Rings between the same workers are built in the order of
            their channels.
    """

    def __init__(
        self,
        listener: DataListener,
        start: Start,
        worker: str,
        timeout_s: float,
        on_broken: OnBroken | None = None,
        check: Callable[[], None] | None = None,
        channel: int = 0,
    ) -> None:
        self._channel = channel
        self._listener, self._start, self._worker, self._timeout_s = listener, start, worker, timeout_s
        self._on_broken, self._check = on_broken, check
        self._lock = threading.Lock()
        self._abort_reason: str | None = None
        self._wake: socket.socket | None = None
        self.still_since_s: float | None = None
        """The time since when build() has waited for its neighbours; None while it does not. Other threads read it."""
        self._transport: Transport | None = None

    def build(self) -> Transport:
        """Return the transport, connected to both neighbours; a world of one gets an AloneTransport.

        Raises PeerLost when a neighbour cannot be reached in time, GenerationEnded after abort(), the errors of
        `check`, and ProtocolError when START carries no key for the proofs. After an error only the listener is left
        open.
        """
        number, placement = self._start.id.number, self._start.placement
        if placement.size == 1:
            return self._publish(AloneTransport(number))
        if len(self._start.data_key) < _SHORTEST_KEY_BYTES:
            raise ProtocolError(f"START of generation {number} carries no data key")
        self.still_since_s = now_s()
        try:
            to_next, from_previous = self._connect()
        finally:
            self.still_since_s = None
        return self._publish(
            RingTransport(
                placement.rank,
                placement.size,
                number,
                to_next,
                from_previous,
                self._start.next,
                self._start.previous,
                self._on_broken,
                self._check,
                may_spin(placement.local_size),
            )
        )

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers to which the ring connects."""
        return (self._start.next, self._start.previous)

    def abort(self, reason: str) -> None:
        """End build() within 5 ms, or the transport that it returned. Callable from any thread."""
        with self._lock:
            if self._abort_reason is None:
                self._abort_reason = reason
            if self._wake is not None:
                with contextlib.suppress(BlockingIOError):  # woken already
                    self._wake.send(b"\0")
            if self._transport is not None:
                self._transport.abort(reason)

    @property
    def has_built(self) -> bool:
        """True when there is a transport, which other threads may abort from now on."""
        return self._transport is not None

    def close(self) -> None:
        """Close the transport that build() returned, if any. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def _publish(self, transport: Transport) -> Transport:
        """Let aborts reach the transport from now on; an earlier abort ends it now."""
        with self._lock:
            self._transport = transport
        if self._abort_reason is not None:
            transport.close()
            self._raise_if_aborted()
        return transport

    def _raise_if_aborted(self) -> None:
        if self._abort_reason is not None:
            raise GenerationEnded("connect", self._start.id.number, self._abort_reason)

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        """Return two proved connections: to the next rank, from the previous one."""
        start = self._start
        ours = Introduction(start.id, self._worker, start.next.worker, b"", self._channel)
        theirs = Introduction(start.id, start.previous.worker, self._worker, b"", self._channel)
        with contextlib.ExitStack() as cleanup:
            selector = cleanup.enter_context(selectors.DefaultSelector())
            self._open_wake(selector, cleanup)
            dialer = Dialer(selector, start.next.address, ours, start.data_key)
            cleanup.callback(dialer.close)
            cleanup.enter_context(self._listener.at_work())
            acceptor = Acceptor(selector, self._listener, theirs, start.data_key)
            cleanup.callback(acceptor.close)
            self._wait(selector, dialer, acceptor)
            return dialer.take(), acceptor.take()

    def _wait(self, selector: selectors.BaseSelector, dialer: Dialer, acceptor: Acceptor) -> None:
        """Wait until both connections are proved."""
        deadline_s = now_s() + self._timeout_s
        while not (dialer.is_done and acceptor.is_done):
            self._raise_if_aborted()
            dialer.dial_if_due()
            left_s = deadline_s - now_s()
            if left_s <= 0:
                self._give_up(dialer)
            wait_s = min(left_s, _SLICE_S)
            if dialer.retry_at_s is not None:
                wait_s = min(wait_s, dialer.retry_at_s - now_s())
            events = selector.select(max(0.0, wait_s))
            for key, _ in events:
                key.data()
            acceptor.drop_surplus()
            if not events and self._check is not None:
                self._check()

    def _give_up(self, dialer: Dialer) -> None:
        """Raise after the time limit, and name the missing neighbour."""
        if dialer.is_done:
            missing: Peer = self._start.previous
            detail = f"worker {missing.worker} did not connect within {self._timeout_s:g} s"
        else:
            missing = self._start.next
            detail = (
                f"no connection to worker {missing.worker} at {missing.address} within "
                f"{self._timeout_s:g} s: {dialer.failure}"
            )
        if self._on_broken is not None:
            self._on_broken(missing.worker, "connect", detail)
        raise PeerLost("connect", self._start.id.number, missing.rank, detail)

    def _open_wake(self, selector: selectors.BaseSelector, cleanup: contextlib.ExitStack) -> None:
        """Open a pair of sockets by which abort() ends a wait."""
        woken, wake = socket.socketpair()
        for sock in (woken, wake):
            sock.setblocking(False)
            close_at_fork(sock)
            cleanup.callback(sock.close)
        selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(1))
        with self._lock:
            self._wake = wake
        cleanup.callback(self._close_wake)

    def _close_wake(self) -> None:
        with self._lock:
            self._wake = None
