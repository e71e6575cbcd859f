"""Build a working ring from START: dial the next rank, accept the previous one, prove both identities."""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections.abc import Callable, Iterator

from farandole.base.machine import may_spin, now_s
from farandole.base.membership import Peer
from farandole.base.wire.authentication import Introduction
from farandole.base.wire.link_messages import Start
from farandole.errors import GenerationEnded, PeerLost, ProtocolError
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.connection_pair import Wake
from farandole.training.collectives.data_listener import Caller, DataListener, Reception
from farandole.training.collectives.dialer import SEND_BYTES, SEND_BYTES_OF_SHARED_CORES, Dialer
from farandole.training.collectives.encrypted_socket import DataSocket
from farandole.training.collectives.ring import OnBroken, RingTransport
from farandole.training.collectives.transport import Transport

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
        self._wake: Wake | None = None
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
        return self._publish(RingTransport(self._start, to_next, from_previous, self._on_broken, self._check))

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
                self._wake.set()
            if self._transport is not None:
                self._transport.abort(reason)

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

    def _connect(self) -> tuple[DataSocket, DataSocket]:
        """Return two proved connections: to the next rank, from the previous one."""
        start = self._start
        ours = Introduction(start.id, self._worker, start.next.worker, self._channel)
        theirs = Introduction(start.id, start.previous.worker, self._worker, self._channel)
        with contextlib.ExitStack() as cleanup:
            selector = cleanup.enter_context(selectors.DefaultSelector())
            cleanup.enter_context(self._woken(selector))
            listener = self._listener
            send_bytes = SEND_BYTES if may_spin(start.placement.local_size) else SEND_BYTES_OF_SHARED_CORES
            dialer = Dialer(
                selector, start.next.address, ours, start.data_key, listener.address, listener.tls, send_bytes
            )
            cleanup.callback(dialer.close)
            cleanup.enter_context(self._listener.at_work())
            acceptor = Acceptor(selector, self._listener, theirs, start.data_key)
            cleanup.callback(acceptor.close)
            self._wait(dialer, acceptor)
            return dialer.take(), acceptor.take()

    def _wait(self, dialer: Dialer, acceptor: Acceptor) -> None:
        """Wait until both connections are proved."""
        deadline_s = now_s() + self._timeout_s
        while not (dialer.is_done and acceptor.is_done):
            self._raise_if_aborted()
            left_s = deadline_s - now_s()
            if left_s <= 0:
                self._give_up(dialer)
            had_events = dialer.run(min(left_s, _SLICE_S))
            acceptor.drop_surplus()
            if not had_events and self._check is not None:
                self._check()

    def _give_up(self, dialer: Dialer) -> None:
        """Raise after the time limit, and name the missing neighbour."""
        if dialer.is_done:
            missing: Peer = self._start.previous
            detail = f"worker {missing.worker} did not connect within {self._timeout_s:g} s"
        else:
            missing = self._start.next
            detail = (
                f"worker {self._worker} at {' and '.join(self._listener.address.hosts)} could not connect to worker "
                f"{missing.worker} at {dialer.failure} within {self._timeout_s:g} s; the hosts must reach each other "
                "at every port: see the firewall, or choose a network with --network-interfaces"
            )
        if self._on_broken is not None:
            self._on_broken(missing.worker, "connect", detail)
        raise PeerLost("connect", self._start.id.number, missing.rank, detail)

    @contextlib.contextmanager
    def _woken(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Let abort() end a wait for events of `selector`."""
        with contextlib.closing(Wake()) as wake:
            selector.register(wake.descriptor, selectors.EVENT_READ, lambda: None)
            with self._lock:
                self._wake = wake
            try:
                yield
            finally:
                with self._lock:
                    self._wake = None


# The connection from the previous rank --------------------------------------------------------------------------------


class Acceptor(Reception):
    """Accepts the connection of the previous rank, which `expected` introduces.

    Callers of a newer generation, or of a higher channel of this one, stay with the listener for that build; all others
    are disconnected.
    """

    def __init__(
        self, selector: selectors.BaseSelector, listener: DataListener, expected: Introduction, key: bytes
    ) -> None:
        super().__init__(selector, listener)
        self._expected, self._key = expected, key
        self._sock: DataSocket | None = None
        for caller in list(listener.callers):
            self._watch(caller)
            self._go_on(caller)

    @property
    def is_done(self) -> bool:
        """True when the previous rank has proved its identity."""
        return self._sock is not None

    def take(self) -> DataSocket:
        """Return the connection, which the caller owns from now on."""
        sock, self._sock = self._sock, None
        assert sock is not None, "take() was called before is_done"
        return sock

    def close(self) -> None:
        """Release the connection unless it was taken, and leave the selector.

        A peer that dials from now on waits for the next build.
        """
        if self._sock is not None:
            self._sock.close()
        for sock in (*self._listener.socks, *(caller.sock for caller in self._listener.callers)):
            self._selector.unregister(sock)
        for caller in [caller for caller in self._listener.callers if caller.is_answered]:
            self._listener.drop(caller)  # half proved, for a generation that is not built again

    def _judge(self, caller: Caller, introduction: Introduction) -> None:
        if introduction == self._expected:
            caller.answer(self._key)
        elif introduction.generation.number < self._expected.generation.number or (
            introduction.generation.number == self._expected.generation.number
            and introduction.channel <= self._expected.channel
        ):
            self._drop(caller)
        # Otherwise the caller is ahead of this worker. The order only decides which caller may wait; identity is
        # proved.

    def _use(self, caller: Caller, proof: bytes) -> None:
        if self.is_done:
            raise ProtocolError("the previous rank is connected already")
        caller.sock.send(proof)
        self._selector.unregister(caller.sock)
        self._sock = self._listener.release(caller)
