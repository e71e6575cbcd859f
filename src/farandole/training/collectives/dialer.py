"""Connections to a peer: dial it at the addresses of its machine until one connection is proved.

A machine may have several networks, and a peer reaches it on some of them only; which ones, no configuration tells for
sure, and networks come and go while a job runs. So all addresses are tried, and the one that worked is tried first from
then on.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket

from farandole.base.machine import close_at_fork, now_s
from farandole.base.membership import Address, DataAddress
from farandole.base.wire.authentication import DialerHandshake, Introduction, Purpose, Role
from farandole.base.wire.encryption import Certificates
from farandole.base.wire.sockets import keep_alive
from farandole.errors import AuthenticationError, ProtocolError
from farandole.training.collectives.encrypted_socket import DataSocket, encrypted, is_ready

_RETRY_S = 0.02

# Until the next address is tried beside those that have not answered. In the Internet 0.25 s are recommended
# (RFC 8305); the hosts of a job are nearer, and the others wait.
_NEXT_S = 0.1

_BUSY_S = 1.0  # the same when one of them is connected: the peer may not read before it is told of the generation


SEND_BYTES, SEND_BYTES_OF_SHARED_CORES = 384 * 1024, 1536 * 1024
"""Sizes of the send buffer of a connection within the machine: small enough for the cache of a core, and where workers
share cores, large enough that a worker sends for a while before the next one has to run."""


class Dialer:
    """Dials a peer repeatedly until a connection is proved.

    A peer that was building an older generation, or was called by too many strangers, may have disconnected the first
    attempts. `introduction` names both workers. `own` is the address of this worker.
    With `tls` the connection is encrypted. The events of `selector` carry the function to call. `send_bytes` is the
    size of the send buffer if the peer is on this machine.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: DataAddress,
        introduction: Introduction,
        key: bytes,
        own: DataAddress | None = None,
        tls: Certificates | None = None,
        send_bytes: int = SEND_BYTES,
    ) -> None:
        self.selector, self.tls, self.send_bytes = selector, tls, send_bytes
        self._hosts, self._key, self._subject = address.hosts, key, introduction.encode()
        self._waiting = [_Attempt(self, Address(host, address.port)) for host in hosts_to_try(address, own)]
        self._begun: list[_Attempt] = []
        self._begun_s = now_s()  # the time of the newest one
        self._proved: _Attempt | None = None

    @property
    def is_done(self) -> bool:
        """True when a connection is proved."""
        return self._proved is not None

    @property
    def failure(self) -> str:
        """The addresses, and why the last attempt at each of them failed, for an error message."""
        return ", ".join(f"{attempt.address} ({attempt.failure})" for attempt in self._begun)

    @property
    def retry_at_s(self) -> float | None:
        """When the next attempt is made; None while all of them are in progress."""
        if self.is_done:
            return None
        times = [attempt.retry_at_s for attempt in self._begun if attempt.retry_at_s is not None]
        if self._waiting:
            times.append(self._next_s())
        return min(times, default=None)

    def run(self, within_s: float) -> bool:
        """Start the attempts that are due, then handle the events of the selector that come within this time, or until
        the next attempt is due. Return whether there were any."""
        self._dial_if_due()
        if self.retry_at_s is not None:
            within_s = min(within_s, self.retry_at_s - now_s())
        events = self.selector.select(max(0.0, within_s))
        for key, _ in events:
            key.data()
        return bool(events)

    def take(self) -> DataSocket:
        """Return the proved connection, which the caller owns from now on."""
        assert self._proved is not None, "take() was called before is_done"
        return self._proved.take()

    def close(self) -> None:
        """Release the connections unless they were taken."""
        for attempt in self._begun:
            attempt.close()

    def _dial_if_due(self) -> None:
        if self.is_done:
            return
        for attempt in self._begun:
            attempt.dial_if_due()
        while self._waiting and self._next_s() <= now_s():
            self._begun_s = now_s()
            self._begun.append(self._waiting.pop(0))
            self._begun[-1].dial_if_due()

    def _next_s(self) -> float:
        """Return when the next address is tried."""
        if all(attempt.has_failed for attempt in self._begun):
            return self._begun_s
        return self._begun_s + (_BUSY_S if any(attempt.is_connected for attempt in self._begun) else _NEXT_S)

    def new_handshake(self) -> DialerHandshake:
        return DialerHandshake(Purpose.DATA, self._key, self._subject)

    def use(self, proved: _Attempt) -> None:
        """Use this attempt, whose connection is proved, and end the others."""
        self._proved = proved
        for attempt in self._begun:
            if attempt is not proved:
                attempt.close()
        _reached[self._hosts] = proved.address.host


class _Attempt:
    """Dials one address repeatedly until a connection is proved.

    failure       why the last attempt failed
    has_failed    one has
    is_connected  the peer's kernel has answered
    retry_at_s    when `dial_if_due` makes the next attempt; None while one is in progress
    """

    def __init__(self, dialer: Dialer, address: Address) -> None:
        self._dialer, self._selector, self.address = dialer, dialer.selector, address
        self._handshake = dialer.new_handshake()
        self._sock: DataSocket | None = None
        self.failure = "no answer"
        self.has_failed = self.is_connected = False
        self.retry_at_s: float | None = now_s()

    def dial_if_due(self) -> None:
        """Start the next attempt if it is due."""
        if self.retry_at_s is None or now_s() < self.retry_at_s:
            return
        self.retry_at_s = None
        self._handshake = self._dialer.new_handshake()
        try:
            raw = socket.socket(socket.AF_INET6 if ":" in self.address.host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # a kernel without IPv6
            self._fail(str(error))
            return
        tune(raw)
        sock = self._sock = encrypted(raw, self._dialer.tls, Role.DIALER)
        self._selector.register(sock, selectors.EVENT_WRITE, lambda: self._on_connected(sock, raw))
        code = raw.connect_ex((self.address.host, self.address.port))
        if code not in (0, errno.EINPROGRESS):
            self._hang_up(sock, os.strerror(code))

    def take(self) -> DataSocket:
        """Return the connection, which the caller owns from now on."""
        sock, self._sock = self._sock, None
        assert sock is not None, "there is no connection, or it was taken"
        return sock

    def close(self) -> None:
        """Release the connection unless it was taken, and make no further attempt."""
        self.retry_at_s = None
        if self._sock is not None:
            if self._sock in self._selector.get_map():
                self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _on_connected(self, sock: DataSocket, raw: socket.socket) -> None:
        if sock is not self._sock:
            return  # closed by an earlier event of the same round
        code = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._hang_up(sock, os.strerror(code))
            return
        self.is_connected = True
        if raw.getsockname()[0] == raw.getpeername()[0]:
            tune_within_machine(raw, self._dialer.send_bytes)
        self._selector.modify(sock, selectors.EVENT_READ, lambda: self._introduce(sock))
        self._introduce(sock)

    def _introduce(self, sock: DataSocket) -> None:
        """Introduce this worker once the connection is encrypted, if it has to be."""
        if sock is not self._sock:
            return  # as above
        try:
            if not is_ready(sock):
                return
            sock.send(self._handshake.begin())  # some bytes into an empty send buffer: all of them
        except OSError as error:
            self._hang_up(sock, str(error))
            return
        self._selector.modify(sock, selectors.EVENT_READ, lambda: self._receive(sock))

    def _receive(self, sock: DataSocket) -> None:
        if sock is not self._sock:
            return  # as above
        try:
            while self._handshake.session is None:
                data = sock.recv(self._handshake.missing)
                if not data:
                    raise ConnectionError("the other side closed the connection")
                outgoing = self._handshake.feed(data)
                if outgoing:
                    sock.send(outgoing)
        except BlockingIOError:
            return
        except (OSError, AuthenticationError, ProtocolError) as error:
            self._hang_up(sock, str(error))
            return
        self._selector.unregister(sock)
        self._dialer.use(self)

    def _hang_up(self, sock: DataSocket, why: str) -> None:
        self._selector.unregister(sock)
        sock.close()
        self._sock = None
        self._fail(why)

    def _fail(self, why: str) -> None:
        self.failure, self.has_failed, self.is_connected = why, True, False
        self.retry_at_s = now_s() + _RETRY_S


# Data sockets ---------------------------------------------------------------------------------------------------------


def tune(sock: socket.socket) -> None:
    """Configure a data socket: non-blocking, small messages sent at once, not inherited by forked children.

    The kernel chooses the buffer sizes, which grow with the distance.
    """
    sock.setblocking(False)
    # A ring may be idle for hours. TCP_USER_TIMEOUT (man 7 tcp) would end peers that compute: they do not read.
    keep_alive(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    close_at_fork(sock)


def tune_within_machine(sock: socket.socket, send_bytes: int) -> None:
    """Configure the sending end of a data connection that does not leave the machine.

    The kernel's own buffers, of 4 MB and more, pass through the memory. A congestion control that paces, such as BBR,
    only waits here. Figures: docs/decisions/transports.md.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes // 2)  # the kernel doubles it: man 7 socket
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # a kernel or a sandbox without the choice
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # always allowed: man 7 tcp


# The choice of an address ---------------------------------------------------------------------------------------------

_reached: dict[tuple[str, ...], str] = {}
"""By the addresses of a machine: the one that was last connected. Of this process."""


def hosts_to_try(peer: DataAddress, own: DataAddress | None) -> tuple[str, ...]:
    """Return the addresses of a peer's machine in the order in which they are tried.

    On another machine, loopback addresses and those that this machine has as well (many have a bridge for containers
    with the same address) would lead back here. They are left out where it is known to be another one, and come last
    where that is not known. On this machine they come first: a network that only the peer has may be gone by now.

    Args:
        peer: The address of the peer.
        own: The address of this worker; None: unknown.
    """
    own = own or DataAddress("", 0)
    elsewhere = [host for host in peer.hosts if host not in own.hosts and not ipaddress.ip_address(host).is_loopback]
    shared = [host for host in peer.hosts if host not in elsewhere]
    usable = [*elsewhere, *shared]
    if peer.network and own.network:
        is_here = peer.network == own.network
        usable = [*shared, *elsewhere] if is_here else elsewhere or shared
    return tuple(sorted(usable, key=lambda host: host != _reached.get(peer.hosts)))  # a stable order


def address_in_use(peer: DataAddress, own: DataAddress | None) -> Address:
    """Return the address at which the peer was last connected, or is tried first."""
    return Address(hosts_to_try(peer, own)[0], peer.port)
