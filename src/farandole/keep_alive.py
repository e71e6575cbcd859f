"""Keep idle TCP connections alive: the kernels of both ends probe each other."""

from __future__ import annotations

import socket

# Firewalls and address translators drop a silent connection after some minutes, and later data on it is lost without an
# error. And a peer that has vanished is detected after two minutes, not never.
_ASK_AFTER_S, _AGAIN_EVERY_S, _ASK_TIMES = 60, 15, 4


def keep_alive(sock: socket.socket) -> None:
    """Enable keep-alive on a TCP socket; it may be connected or not.

    A peer whose kernel answers is kept, however long it computes.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _ASK_AFTER_S),
        ("TCP_KEEPINTVL", _AGAIN_EVERY_S),
        ("TCP_KEEPCNT", _ASK_TIMES),
    ):
        if hasattr(socket, name):  # otherwise the system's own values, mostly hours
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
