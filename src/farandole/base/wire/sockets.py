"""What all sockets of Farandole need: a connection that stays alive while it is idle, listening on several addresses of
this machine, and waiting for one descriptor.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Sequence
from typing import Protocol

# Firewalls and address translators drop a silent connection after some minutes, and later data on it is lost without an
# error. And a peer that has vanished is detected after two minutes, not never.
_ASK_AFTER_S, _AGAIN_EVERY_S, _ASK_TIMES = 60, 15, 4


def keep_alive(sock: socket.socket) -> None:
    """Enable keep-alive on a TCP socket; it may be connected or not. A peer whose kernel answers is kept, however long
    it computes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _ASK_AFTER_S),
        ("TCP_KEEPINTVL", _AGAIN_EVERY_S),
        ("TCP_KEEPCNT", _ASK_TIMES),
    ):
        if hasattr(socket, name):  # otherwise the system's own values, mostly hours
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Listening on several addresses of this machine -----------------------------------------------------------------------

_PORTS_TRIED = 16


def listening_sockets(hosts: Sequence[str], port: int = 0) -> list[socket.socket]:
    """Return sockets that are bound to these numeric addresses, or to "localhost", and all to one port; 0: to one that
    is free at all of them. Raises OSError when an address cannot be used, or there is none.

    An address that this machine does not have, or not any more, is left out as long as there is another one: networks
    of a machine come and go.
    """
    for attempt in range(_PORTS_TRIED):
        sockets: list[socket.socket] = []
        missing: OSError | None = None
        try:
            for host in hosts:
                try:
                    sockets.append(_bound(host, sockets[0].getsockname()[1] if sockets else port))
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                    missing = error
            if missing is not None and not sockets:
                raise missing
        except OSError as error:
            for each in sockets:
                each.close()
            if not sockets or port or error.errno != errno.EADDRINUSE or attempt == _PORTS_TRIED - 1:
                raise
        else:
            return sockets
    raise AssertionError("unreachable")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


# Waiting for one descriptor -------------------------------------------------------------------------------------------
#
# select() accepts only descriptors with numbers below 1024; poll() accepts all.


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def can_read(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Return whether a read would not block: there is data, or the end. Waits for up to `within_s` seconds, for ever
    with None. Raises ValueError for a closed descriptor."""
    return _is_ready(descriptor, select.POLLIN, within_s)


def can_write(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Return whether a write would not block, or would fail; waits as can_read() does."""
    return _is_ready(descriptor, select.POLLOUT, within_s)


def _is_ready(descriptor: int | HasDescriptor, event: int, within_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if within_s is None else 1000 * within_s))
