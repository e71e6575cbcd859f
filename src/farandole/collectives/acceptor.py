"""Accept one connection from the previous rank among all callers. ring_builder.py uses it together with dialer.py."""

from __future__ import annotations

import selectors
import socket
from functools import partial

from farandole.collectives.handshake import (
    INTRODUCTION_LIMIT,
    PROOF_BYTES,
    Introduction,
    acceptor_reply,
    decode_introduction,
    is_dialer_proved,
)
from farandole.collectives.listener import Caller, DataListener
from farandole.errors import ProtocolError


class Acceptor:
    """Listens to all callers at once, so that no other caller can delay the previous rank.

    `expected` introduces the previous rank; its nonce is ignored. Callers of a newer generation, or of a higher channel
    of this one, stay with the listener for that build; all others are disconnected. The events of `selector` carry the
    function to call.
    """

    def __init__(
        self, selector: selectors.BaseSelector, listener: DataListener, expected: Introduction, key: bytes
    ) -> None:
        self._selector, self._listener = selector, listener
        self._expected, self._key = expected, key
        self._sock: socket.socket | None = None
        selector.register(listener.sock, selectors.EVENT_READ, self._welcome)
        for caller in list(listener.callers):
            self._watch(caller)
            if caller.introduction is not None:
                self._judge(caller, caller.introduction)

    @property
    def is_done(self) -> bool:
        """True when the previous rank has proved its identity."""
        return self._sock is not None

    def take(self) -> socket.socket:
        """Return the connection, which the caller owns from now on."""
        sock, self._sock = self._sock, None
        assert sock is not None, "take() before is_done"
        return sock

    def drop_surplus(self) -> None:
        """Disconnect surplus and overdue callers. The builder calls this periodically."""
        for old in self._listener.surplus():
            self._drop(old)

    def close(self) -> None:
        """Release the connection unless it was taken, and leave the selector.

        A peer that dials from now on waits for the next build.
        """
        if self._sock is not None:
            self._sock.close()
        for sock in (self._listener.sock, *(caller.sock for caller in self._listener.callers)):
            self._selector.unregister(sock)
        for caller in [caller for caller in self._listener.callers if caller.nonce]:
            self._listener.drop(caller)  # half proved, for a generation that is not built again

    def _watch(self, caller: Caller) -> None:
        self._selector.register(caller.sock, selectors.EVENT_READ, partial(self._hear, caller))

    def _welcome(self) -> None:
        while (caller := self._listener.accept()) is not None:
            self._watch(caller)
            self.drop_surplus()

    def _hear(self, caller: Caller) -> None:
        if caller not in self._listener.callers:
            return  # dropped by an earlier event of the same round
        # Read not one byte more than the proof: the bytes that follow belong to the ring.
        limit = PROOF_BYTES if caller.nonce else INTRODUCTION_LIMIT + 1
        try:
            data = caller.sock.recv(limit - len(caller.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or (caller.introduction is not None and not caller.nonce):
            self._drop(caller)  # disconnected, or sent more before it was answered
            return
        caller.received += data
        if caller.introduction is None:
            self._hear_introduction(caller)
        elif len(caller.received) == PROOF_BYTES:
            self._hear_proof(caller, caller.introduction)

    def _hear_introduction(self, caller: Caller) -> None:
        try:
            caller.introduction = decode_introduction(caller.received)
        except ProtocolError:
            self._drop(caller)
            return
        if caller.introduction is not None:
            caller.received = b""
            self._judge(caller, caller.introduction)

    def _judge(self, caller: Caller, introduction: Introduction) -> None:
        if introduction.announces(self._expected):
            try:
                caller.sock.send(acceptor_reply(self._key, introduction, caller.make_nonce()))
            except OSError:
                self._drop(caller)
        elif introduction.generation.number < self._expected.generation.number or (
            introduction.generation.number == self._expected.generation.number
            and introduction.channel <= self._expected.channel
        ):
            self._drop(caller)
        # Otherwise the caller is ahead of this worker. The order only decides which caller may wait; identity is
        # proved.

    def _hear_proof(self, caller: Caller, introduction: Introduction) -> None:
        if self.is_done or not is_dialer_proved(self._key, introduction, caller.nonce, caller.received):
            self._drop(caller)
            return
        self._selector.unregister(caller.sock)
        self._sock = self._listener.release(caller)

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.sock)
        self._listener.drop(caller)
