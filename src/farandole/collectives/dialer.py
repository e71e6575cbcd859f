"""Dial the next rank until one connection is established. ring_builder.py uses it, beside its Acceptor."""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket

import msgspec

from farandole.clock import now_s
from farandole.collectives.handshake import NONCE_BYTES, REPLY_BYTES, Introduction, dialer_proof
from farandole.collectives.listener import peek, tune
from farandole.membership import Address

_RETRY_S = 0.02


class Dialer:
    """Dials `address` repeatedly until a connection is proved.

    A peer that was building an older generation, or was called by too many strangers, may have disconnected the first
    attempts. `introduction` names both workers; each attempt has its own nonce. The events of `selector` carry the
    function to call.

    Attributes:
        failure: Why the last attempt failed, for an error message.
        retry_at_s: When `dial_if_due` makes the next attempt; None while one is in progress.
    """

    def __init__(
        self, selector: selectors.BaseSelector, address: Address, introduction: Introduction, key: bytes
    ) -> None:
        self._selector, self._address, self._key = selector, address, key
        self._introduction = introduction
        self._reply = b""
        self._sock: socket.socket | None = None
        self.is_done = False
        self.failure = "no answer"
        self.retry_at_s: float | None = now_s()

    def dial_if_due(self) -> None:
        """Start the next attempt if it is due."""
        if self.retry_at_s is None or now_s() < self.retry_at_s:
            return
        self.retry_at_s = None
        self._introduction = msgspec.structs.replace(self._introduction, nonce=secrets.token_bytes(NONCE_BYTES))
        self._reply = b""
        family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
        tune(sock)
        self._selector.register(sock, selectors.EVENT_WRITE, lambda: self._introduce(sock))
        code = sock.connect_ex((self._address.host, self._address.port))
        if code not in (0, errno.EINPROGRESS):
            self._hang_up(sock, os.strerror(code))

    def take(self) -> socket.socket:
        """Return the proved connection, which the caller owns from now on."""
        sock, self._sock = self._sock, None
        assert sock is not None, "take() was called before is_done"
        return sock

    def close(self) -> None:
        """Release the connection unless it was taken."""
        if self._sock is not None:
            self._sock.close()

    def _introduce(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._hang_up(sock, os.strerror(code))
            return
        self._selector.modify(sock, selectors.EVENT_READ, lambda: self._receive_reply(sock))
        self._send(sock, self._introduction.encode())

    def _receive_reply(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(REPLY_BYTES - len(self._reply))
        except BlockingIOError:
            return
        except OSError as error:
            self._hang_up(sock, str(error))
            return
        if not data:
            self._hang_up(sock, "the other side closed the connection")
            return
        self._reply += data
        if len(self._reply) < REPLY_BYTES:
            return
        proof = dialer_proof(self._key, self._introduction, self._reply)
        if proof is None:
            self._hang_up(sock, "the other side did not prove its identity")
        elif peek(sock) == b"":  # it timed out while this process could not run, and would not read this side's proof
            self._hang_up(sock, "the other side closed the connection")
        elif self._send(sock, proof):
            self._selector.unregister(sock)
            self.is_done = True

    def _send(self, sock: socket.socket, text: bytes) -> bool:
        """Send a few bytes into an empty send buffer; all of them or none."""
        try:
            sock.send(text)
        except OSError as error:
            self._hang_up(sock, str(error))
            return False
        return True

    def _hang_up(self, sock: socket.socket, why: str) -> None:
        self._selector.unregister(sock)
        sock.close()
        self._sock = None
        self.failure = why
        self.retry_at_s = now_s() + _RETRY_S
