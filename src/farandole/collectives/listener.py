"""Where a worker's peers dial it, over all generations, and the callers that are not in a ring yet."""

from __future__ import annotations

import socket

from farandole.collectives.handshake import Introduction
from farandole.fork_safety import close_at_fork
from farandole.membership import Address

_BACKLOG = 128
_SILENT_S = 5  # at least so long who connects and says nothing stays out of the backlog
_MOST_CALLERS = 64


def tune(sock: socket.socket) -> None:
    """Set a data socket up: non-blocking, small messages at once, not kept by forked children.

    The sizes of its buffers stay the kernel's business: what it tunes by itself was as fast over loopback as
    any fixed size from 1 to 8 MB, and it grows with the distance, which a fixed size does not.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    close_at_fork(sock)


class Caller:
    """An accepted connection that has not proved anything yet.

    received      bytes not understood yet
    introduction  what it says it is, once all of that has come
    nonce         ours, once we answered; empty before
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.introduction: Introduction | None = None
        self.nonce = b""


class DataListener:
    """A listening socket for data connections; one for each worker process, for life.

    A peer may dial before this worker heard of the new generation. Its connection then waits in the kernel's
    backlog, or, when another build has already accepted it, among `callers`. They are bounded: a stranger
    that opens connections pushes out other callers, the oldest first, and a real peer dials again.

    Raises OSError when `host` is no address of this machine.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(self.sock)
            if hasattr(
                socket, "TCP_DEFER_ACCEPT"
            ):  # Linux. Probes say nothing and hang up: they must not fill the backlog
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
            self.sock.bind((host, 0))
            self.sock.listen(_BACKLOG)
        except OSError:
            self.sock.close()
            raise
        self.address = Address(host, self.sock.getsockname()[1])
        self.callers: list[Caller] = []

    def accept(self) -> Caller | None:
        """The next caller, who is among `callers` from now on; None when nobody waits."""
        try:
            sock, _ = self.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):  # nobody, or gone already
            return None
        tune(sock)
        caller = Caller(sock)
        self.callers.append(caller)
        return caller

    def surplus(self) -> list[Caller]:
        """The oldest callers beyond the limit; never one that was answered, which no stranger achieves."""
        unanswered = [caller for caller in self.callers if not caller.nonce]
        return unanswered[: max(0, len(unanswered) - _MOST_CALLERS)]

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
