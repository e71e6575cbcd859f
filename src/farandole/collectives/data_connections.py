"""The socket at which a worker's peers dial it, over all generations, and the callers that are not in a ring yet."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator

import msgspec

from farandole.clock import now_s
from farandole.collectives.handshake import (
    INTRODUCTION_LIMIT,
    NONCE_BYTES,
    REPLY_BYTES,
    Introduction,
    decode_introduction,
    dialer_proof,
)
from farandole.errors import ProtocolError
from farandole.fork_safety import close_at_fork
from farandole.membership import Address
from farandole.wire.sockets import keep_alive

_BACKLOG = 1024  # no thread accepts while another one holds the interpreter
_SILENT_S = 5  # a caller that connects and sends nothing stays out of the backlog for at least this time
_MOST_CALLERS = 64
_PROOF_S = 5.0


def tune(sock: socket.socket) -> None:
    """Configure a data socket: non-blocking, small messages sent at once, not inherited by forked children.

    The kernel chooses the buffer sizes: its own tuning was as fast over loopback as any fixed size from 1 to 8 MB, and
    it grows with the distance, which a fixed size does not.
    """
    sock.setblocking(False)
    # A ring may be idle for hours. TCP_USER_TIMEOUT (man 7 tcp) would end peers that compute: they do not read.
    keep_alive(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    close_at_fork(sock)


def peek(sock: socket.socket) -> bytes | None:
    """Return some of the bytes that wait to be read; None while there are none, b"" when none will come."""
    try:
        return sock.recv(INTRODUCTION_LIMIT + 1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Caller:
    """An accepted connection that has not proved its identity yet.

    Attributes:
        received: The bytes that are not decoded yet.
        introduction: The caller's introduction, once it is complete.
        nonce: This worker's nonce, once it has answered; empty before.
        answered_s: The time of the answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.introduction: Introduction | None = None
        self.nonce = b""
        self.answered_s = 0.0

    def make_nonce(self) -> bytes:
        """Create the nonce for the answer, which is sent now."""
        self.nonce, self.answered_s = secrets.token_bytes(NONCE_BYTES), now_s()
        return self.nonce

    def may_become_a_peer(self) -> bool:
        """Return whether an unanswered caller is still connected and has sent at most an introduction."""
        data = peek(self.sock)
        if data is None:
            return True
        if not data or self.introduction is not None:
            return False
        try:
            decode_introduction(self.received + data)
        except ProtocolError:
            return False
        return True


class DataListener:
    """A listening socket for data connections; one for each worker process, for life.

    A peer may dial before this worker is told of the new generation. Its connection then waits in the kernel's backlog,
    or, when another build or tidy() has already accepted it, among `callers`. Their number is bounded: a stranger that
    opens connections displaces other callers, the oldest first, and a real peer dials again.

    Raises OSError when `host` is no address of this machine.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(self.sock)
            # Only Linux has it (man 7 tcp). Probes send nothing and disconnect: they must not fill the backlog.
            if hasattr(socket, "TCP_DEFER_ACCEPT"):
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
            self.sock.bind((host, 0))
            self.sock.listen(_BACKLOG)
        except OSError:
            self.sock.close()
            raise
        self.address = Address(host, self.sock.getsockname()[1])
        self.callers: list[Caller] = []
        self._lock = threading.Lock()
        self._at_work = 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Mark that a builder accepts callers and listens to them, so that tidy() leaves them alone."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1

    def tidy(self) -> None:
        """Accept the callers that wait between builds. Call this periodically, from any thread.

        Between builds no other code accepts, and a caller that connects and disconnects stays in the backlog. Once the
        backlog is full, the kernel drops new connections, and this worker looks unreachable.
        """
        with self._lock:
            if self._at_work:
                return
            for caller in list(self.callers):
                if not caller.may_become_a_peer():
                    self.drop(caller)
            with contextlib.suppress(OSError):  # closed meanwhile, or out of descriptors: retry later
                for _ in range(_BACKLOG):
                    if self.accept() is None:
                        break
                    for old in self.surplus():
                        self.drop(old)

    def accept(self) -> Caller | None:
        """Return the next caller that may become a peer, now among `callers`; None when there is none."""
        while True:
            try:
                sock, _ = self.sock.accept()
            except (BlockingIOError, ConnectionAbortedError):  # no caller, or gone already
                return None
            tune(sock)
            caller = Caller(sock)
            if caller.may_become_a_peer():
                self.callers.append(caller)
                return caller
            sock.close()

    def surplus(self, dialers: int = 1) -> list[Caller]:
        """Return the callers to disconnect: the oldest beyond the limits, and answered callers that do not proceed.

        An answered caller knows the generation, and competes only with others that do. `dialers` is the number of peers
        that may legitimately call at once.
        """
        most = max(_MOST_CALLERS, dialers)
        unanswered = [caller for caller in self.callers if not caller.nonce]
        answered = [caller for caller in self.callers if caller.nonce]
        latest_s = now_s() - _PROOF_S
        # A proof that has arrived counts, even when this process was too slow to read it.
        overdue = [each for each in answered[-most:] if each.answered_s < latest_s and peek(each.sock) is None]
        return [*unanswered[:-most], *answered[:-most], *overdue]

    def drop(self, caller: Caller) -> None:
        """Disconnect the caller."""
        self.callers.remove(caller)
        caller.sock.close()

    def release(self, caller: Caller) -> socket.socket:
        """Hand over the connection of a caller that has proved its identity."""
        self.callers.remove(caller)
        return caller.sock

    def close(self) -> None:
        """Stop listening and disconnect all callers. Idempotent."""
        self.sock.close()
        for caller in list(self.callers):
            self.drop(caller)


# Dial the next rank until one connection is established. ring_builder.py uses it, beside its Acceptor -----------------

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
