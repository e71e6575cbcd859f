"""Where a worker's peers dial it, over all generations, and the callers that are not in a ring yet."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator

from farandole.clock import now_s
from farandole.collectives.handshake import INTRODUCTION_LIMIT, NONCE_BYTES, Introduction, decode_introduction
from farandole.errors import ProtocolError
from farandole.fork_safety import close_at_fork
from farandole.keep_alive import keep_alive
from farandole.membership import Address

_BACKLOG = 1024  # nobody accepts while a thread holds the interpreter
_SILENT_S = 5  # at least so long who connects and says nothing stays out of the backlog
_MOST_CALLERS = 64
_PROOF_S = 5.0


def tune(sock: socket.socket) -> None:
    """Set a data socket up: non-blocking, small messages at once, not kept by forked children.

    The sizes of its buffers stay the kernel's business: what it tunes by itself was as fast over loopback as
    any fixed size from 1 to 8 MB, and it grows with the distance, which a fixed size does not.
    """
    sock.setblocking(False)
    keep_alive(sock)  # a ring may be idle for hours. TCP_USER_TIMEOUT would end peers that compute: they do not read
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    close_at_fork(sock)


def peek(sock: socket.socket) -> bytes | None:
    """Some of what waits to be read; None while nothing does, b"" when nothing will."""
    try:
        return sock.recv(INTRODUCTION_LIMIT + 1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Caller:
    """An accepted connection that has not proved anything yet.

    received      bytes not understood yet
    introduction  what it says it is, once all of that has come
    nonce         ours, once we answered; empty before
    answered_s    when that was
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.introduction: Introduction | None = None
        self.nonce = b""
        self.answered_s = 0.0

    def make_nonce(self) -> bytes:
        """For the answer, which is given now."""
        self.nonce, self.answered_s = secrets.token_bytes(NONCE_BYTES), now_s()
        return self.nonce

    def may_become_a_peer(self) -> bool:
        """Whether it is still there, and has said nothing but an introduction. For one that was not answered."""
        said = peek(self.sock)
        if said is None:
            return True
        if not said or self.introduction is not None:
            return False
        try:
            decode_introduction(self.received + said)
        except ProtocolError:
            return False
        return True


class DataListener:
    """A listening socket for data connections; one for each worker process, for life.

    A peer may dial before this worker heard of the new generation. Its connection then waits in the kernel's
    backlog, or, when another build or tidy() has already accepted it, among `callers`. They are bounded: a stranger
    that opens connections pushes out other callers, the oldest first, and a real peer dials again.

    Raises OSError when `host` is no address of this machine.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(self.sock)
            # Linux has it. Probes say nothing and hang up: they must not fill the backlog.
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
        """While a builder accepts callers and listens to them: tidy() leaves them alone."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1

    def tidy(self) -> None:
        """To be called now and then, from any thread: between builds nobody else accepts, and whoever connects and
        hangs up stays in the backlog until then. Once it is full the kernel drops what comes, and this worker looks
        unreachable."""
        with self._lock:
            if self._at_work:
                return
            for caller in list(self.callers):
                if not caller.may_become_a_peer():
                    self.drop(caller)
            with contextlib.suppress(OSError):  # closed meanwhile, or no descriptor is left: another time
                for _ in range(_BACKLOG):
                    if self.accept() is None:
                        break
                    for old in self.surplus():
                        self.drop(old)

    def accept(self) -> Caller | None:
        """The next caller that may become a peer, who is among `callers` from now on; None when nobody waits."""
        while True:
            try:
                sock, _ = self.sock.accept()
            except (BlockingIOError, ConnectionAbortedError):  # nobody, or gone already
                return None
            tune(sock)
            caller = Caller(sock)
            if caller.may_become_a_peer():
                self.callers.append(caller)
                return caller
            sock.close()

    def surplus(self, dialers: int = 1) -> list[Caller]:
        """Whom to hang up on: the oldest callers beyond the limits, and those that were answered and do not go on.

        Who was answered knows the generation, and competes only with others that do. `dialers`: so many may call at
        once for good reasons.
        """
        most = max(_MOST_CALLERS, dialers)
        unanswered = [caller for caller in self.callers if not caller.nonce]
        answered = [caller for caller in self.callers if caller.nonce]
        latest_s = now_s() - _PROOF_S
        # A proof that has come counts, also when this process was too slow to read it.
        overdue = [each for each in answered[-most:] if each.answered_s < latest_s and peek(each.sock) is None]
        return [*unanswered[:-most], *answered[:-most], *overdue]

    def drop(self, caller: Caller) -> None:
        """Hang up."""
        self.callers.remove(caller)
        caller.sock.close()

    def release(self, caller: Caller) -> socket.socket:
        """Hand a caller's connection over to whom it has proved itself."""
        self.callers.remove(caller)
        return caller.sock

    def close(self) -> None:
        """Stop listening and hang up on all callers. Idempotent."""
        self.sock.close()
        for caller in list(self.callers):
            self.drop(caller)
