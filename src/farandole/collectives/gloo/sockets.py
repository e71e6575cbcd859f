"""Find and end the connections of a Gloo group, whose own abort() does nothing. gloo_transport.py uses it.

The ports at which the group's ranks listen identify them. A listing of descriptors before and after a group is built
would be simpler, but other threads open sockets meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator

Listening = tuple[str, int]
"""(host, port)"""


def listens_at(words: bytes) -> Listening | None:
    """Return the address at which this process listens; None where it cannot be found.

    It is that of the listening socket whose address occurs in Gloo's message to the other ranks.
    """
    for sock in _sockets():
        if _is_listening(sock):
            host, port = sock.getsockname()[:2]
            if _packed(sock.family, host, port) in words:
                return host, port
    return None


def shut_down(own: Listening, others: Collection[Listening]) -> None:
    """End all connections of a group, at both ends. Callable from any thread. `own` is where this rank listens."""
    for sock in _sockets():
        with contextlib.suppress(OSError):  # not connected
            # Never the listening socket itself: Gloo ends the process when accept() fails.
            if not _is_listening(sock) and (sock.getsockname()[:2] == own or sock.getpeername()[:2] in others):
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Yield all TCP sockets of the process, as copies of their descriptors that are valid until the next one."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except OSError:
            continue  # closed since, or the listing itself
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _packed(family: int, host: str, port: int) -> bytes:
    """Return the beginning of a sockaddr, as in Gloo's message."""
    address = socket.inet_pton(family, host.partition("%")[0])
    begin = struct.pack("=H", family) + struct.pack("!H", port)
    return begin + (b"\0\0\0\0" if family == socket.AF_INET6 else b"") + address
