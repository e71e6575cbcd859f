"""The socket at which a worker's peers dial it, over all generations, and the callers that are not in a ring yet."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from functools import partial

from farandole.base.machine import network_stack, now_s
from farandole.base.membership import DataAddress
from farandole.base.wire.authentication import Introduction, ListenerHandshake, Purpose, Role, decode_introduction
from farandole.base.wire.encryption import Certificates
from farandole.base.wire.listening import FailureBudget
from farandole.errors import AuthenticationError, ProtocolError
from farandole.training.collectives.dialer import tune
from farandole.training.collectives.encrypted_socket import (
    DataSocket,
    EncryptedSocket,
    arrived,
    begins_tls,
    encrypted,
    is_ready,
)

_BACKLOG = 1024  # no thread accepts while another one holds the interpreter
_SILENT_S = 5  # a caller that connects and sends nothing stays out of the backlog for at least this time
_MOST_CALLERS = 64
_PROOF_S = 5.0
_INTRODUCTION_S = 5.0  # a real peer that was hung up on dials again


class Caller:
    """An accepted connection that has not proved its identity yet.

    Attributes:
        introduction: The caller's introduction, once it is complete.
        is_answered: This worker has answered it.
        answered_s: The time of the answer.
        accepted_s: The time since when this process knows of it.
    """

    def __init__(self, sock: DataSocket) -> None:
        self.sock = sock
        self._handshake = ListenerHandshake(Purpose.DATA)
        self.introduction: Introduction | None = None
        self.is_answered = False
        self.answered_s = 0.0
        self.accepted_s = now_s()

    @property
    def is_proved(self) -> bool:
        """True when the caller has proved its identity."""
        return self._handshake.session is not None

    def receive(self) -> bytes:
        """Read the next part of its handshake: not one byte more, since those that follow belong to the ring. Return
        this side's proof when the caller has proved itself.

        Raises BlockingIOError while there is nothing, and OSError, AuthenticationError and ProtocolError for a caller
        that must be disconnected.
        """
        if not is_ready(self.sock):
            raise BlockingIOError
        while True:
            data = self.sock.recv(self._handshake.missing)
            if not data:
                raise ProtocolError("the caller closed the connection")
            outgoing = self._handshake.feed(data)
            if self.introduction is None and self._handshake.subject is not None:
                self.introduction = decode_introduction(self._handshake.subject)
                return outgoing
            if self.is_proved:
                return outgoing

    def answer(self, key: bytes) -> None:
        """Send the challenge to prove this key. Raises OSError."""
        self.is_answered, self.answered_s = True, now_s()
        self.sock.send(self._handshake.challenge(key))

    def may_become_a_peer(self) -> bool:
        """Return whether an unanswered caller is still connected and has sent at most an introduction."""
        data = arrived(self.sock)
        if data is None:
            return True
        if not data or self.introduction is not None:
            return False
        if isinstance(self.sock, EncryptedSocket):
            return self.sock.has_begun or begins_tls(data)
        return self._handshake.could_go_on(data)


class DataListener:
    """The listening sockets for data connections; one listener for each worker process, for life.

    It listens at each of `hosts`, on one port. An address after the first one at which it cannot listen is left out.
    With `tls` its connections are encrypted, and those to its peers, too.

    A peer may dial before this worker is told of the new generation. Its connection then waits in the kernel's backlog,
    or, when another build or tidy() has already accepted it, among `callers`. Their number is bounded: a stranger that
    opens connections displaces other callers, the oldest first, and a real peer dials again.

    Raises OSError when the first one is no address of this machine.
    """

    def __init__(self, *hosts: str, tls: Certificates | None = None) -> None:
        self.tls = tls
        first, *others = hosts or ("127.0.0.1",)
        self.socks = [_listening_socket(first, 0)]
        port = self.socks[0].getsockname()[1]
        used = []
        for host in others:
            with contextlib.suppress(OSError):  # the address is gone, or another process has this port there
                self.socks.append(_listening_socket(host, port))
                used.append(host)
        self.address = DataAddress(first, port, tuple(used), network_stack())
        self.budget = FailureBudget()
        """Of the callers that were no peers, for a thread that accepts while others train."""
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
            for old in self.surplus():
                self.drop(old)

    def accept(self, is_limited: bool = False) -> Caller | None:
        """Return the next caller that may become a peer, now among `callers`; None when there is none, or, where
        `is_limited`, the budget is used up."""
        for listening in self.socks:
            while not (is_limited and self.budget.pause_s()) and (sock := _accepted(listening)) is not None:
                tune(sock)
                caller = Caller(encrypted(sock, self.tls, Role.LISTENER))
                if caller.may_become_a_peer():
                    self.callers.append(caller)
                    return caller
                sock.close()
                self.budget.count()
        return None

    def surplus(self, dialers: int = 1) -> list[Caller]:
        """Return the callers to disconnect: the oldest beyond the limits, and those that take too long.

        An answered caller knows the generation, and competes only with others that do. `dialers` is the number of peers
        that may legitimately call at once.
        """
        most = max(_MOST_CALLERS, dialers)
        unanswered = [caller for caller in self.callers if not caller.is_answered]
        answered = [caller for caller in self.callers if caller.is_answered]
        latest_s = now_s() - _PROOF_S
        # A proof that has arrived counts, even when this process was too slow to read it.
        overdue = [each for each in answered[-most:] if each.answered_s < latest_s and arrived(each.sock) is None]
        # What waits for a later generation may wait longer than that, and dials again.
        late = [each for each in unanswered[-most:] if each.accepted_s < now_s() - _INTRODUCTION_S]
        return [*unanswered[:-most], *late, *answered[:-most], *overdue]

    def drop(self, caller: Caller) -> None:
        """Disconnect the caller."""
        self.callers.remove(caller)
        caller.sock.close()
        self.budget.count()

    def release(self, caller: Caller) -> DataSocket:
        """Hand over the connection of a caller that has proved its identity."""
        self.callers.remove(caller)
        return caller.sock

    def close(self) -> None:
        """Stop listening and disconnect all callers. Idempotent."""
        for sock in self.socks:
            sock.close()
        for caller in list(self.callers):
            self.drop(caller)


class Reception:
    """Listens to all callers at once, so that no caller can delay another. The events of `selector` carry the function
    to call.

    A subclass judges introductions, and uses the connections of callers that have proved their identity; where it
    raises OSError or ProtocolError, the caller is disconnected. `dialers` and `is_limited` are those of surplus() and
    accept().
    """

    def __init__(
        self, selector: selectors.BaseSelector, listener: DataListener, dialers: int = 1, is_limited: bool = False
    ) -> None:
        self._selector, self._listener = selector, listener
        self._dialers, self._is_limited = dialers, is_limited
        for sock in listener.socks:
            selector.register(sock, selectors.EVENT_READ, self._welcome)

    def _judge(self, caller: Caller, introduction: Introduction) -> None:
        """Answer a caller, disconnect it, or leave it for another build."""
        raise NotImplementedError

    def _use(self, caller: Caller, proof: bytes) -> None:
        """Send this side's proof to the caller, which has proved itself, and release its connection."""
        raise NotImplementedError

    def drop_surplus(self) -> None:
        """Disconnect surplus and overdue callers. To be called periodically."""
        for old in self._listener.surplus(self._dialers):
            self._drop(old)

    def _welcome(self) -> None:
        while (caller := self._listener.accept(self._is_limited)) is not None:
            self._watch(caller)
            self.drop_surplus()

    def _watch(self, caller: Caller) -> None:
        self._selector.register(caller.sock, selectors.EVENT_READ, partial(self._read_caller, caller))

    def _read_caller(self, caller: Caller) -> None:
        if caller not in self._listener.callers:
            return  # dropped by an earlier event of the same round
        try:
            outgoing = caller.receive()
        except BlockingIOError:
            return
        except (OSError, AuthenticationError, ProtocolError):
            self._drop(caller)
            return
        self._go_on(caller, outgoing)

    def _go_on(self, caller: Caller, outgoing: bytes = b"") -> None:
        try:
            if caller.is_proved:
                self._use(caller, outgoing)
            elif caller.introduction is not None and not caller.is_answered:
                self._judge(caller, caller.introduction)
        except (OSError, ProtocolError):
            if caller not in self._listener.callers:
                raise  # its connection is in use already
            self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.sock)
        self._listener.drop(caller)


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; port 0: at any port."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock)
        # Only Linux has it (man 7 tcp). Probes send nothing and disconnect: they must not fill the backlog.
        if hasattr(socket, "TCP_DEFER_ACCEPT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _accepted(listening: socket.socket) -> socket.socket | None:
    """Return the next connection; None when there is none, or it is gone already."""
    try:
        return listening.accept()[0]
    except (BlockingIOError, ConnectionAbortedError):
        return None
