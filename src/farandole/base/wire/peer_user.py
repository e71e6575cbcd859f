"""The user who owns the other end of a connection within this machine, as the kernel tells it: for unix sockets, and
for TCP on loopback, where every user may connect."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import struct
import sys

_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

# The request and the answer for one socket: struct inet_diag_req_v2 and inet_diag_msg of linux/inet_diag.h, each after
# a struct nlmsghdr (man 7 sock_diag, man 7 netlink).
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_PORTS = struct.Struct(">HH")
_ANYTHING = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
_ALL_STATES = 0xFFFFFFFF
_ESTABLISHED = 1
_ANSWER = struct.Struct("=BBBB48sIIIII")


def is_of_another_user(connected: socket.socket) -> bool:
    """Return whether another user of this machine owns the other end of a unix socket or of a TCP connection.

    True also for a TCP connection within this machine whose other end was closed: its last bytes may be anybody's.
    False for a TCP connection from another machine, and on systems that do not tell: there the permissions of its
    folder protect a unix socket.
    """
    if sys.platform != "linux":
        return False
    if connected.family == socket.AF_UNIX:  # abstract addresses have no permissions (man 7 unix)
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        return bool(uid != os.getuid())
    try:
        theirs, ours = connected.getpeername()[:2], connected.getsockname()[:2]
    except OSError:
        return False  # it is gone already
    is_here = theirs[0] == ours[0] or ipaddress.ip_address(theirs[0].partition("%")[0]).is_loopback
    return is_here and _is_supported() and _owner(connected.family, theirs, ours) != os.getuid()


@functools.cache
def _is_supported() -> bool:
    """Return whether the kernel tells the owners of TCP sockets: it may lack the module, and sandboxes refuse it."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            return _owner(client.family, client.getsockname(), client.getpeername()) is not None
    except OSError:
        return False


def _owner(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Return the user id of the owner of an established TCP socket of this machine; None where there is no such one: it
    was closed meanwhile."""
    request = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
        + _PORTS.pack(local[1], remote[1])
        + b"".join(socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0") for host, _ in (local, remote))
        + _ANYTHING
    )
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(1.0)
            netlink.send(header + request)
            answer = netlink.recv(1 << 13)
    except OSError:
        return None
    kind = _HEADER.unpack_from(answer)[1]
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _HEADER.size + _ANSWER.size:
        return None
    _, state, _, _, _, _, _, _, uid, _ = _ANSWER.unpack_from(answer, _HEADER.size)
    return int(uid) if state == _ESTABLISHED else None
