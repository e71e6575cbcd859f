"""Connections on which nothing is said for long: their kernels ask each other now and then."""

from __future__ import annotations

import socket

# Firewalls and address translators forget a silent connection after some minutes, and what is said on it later is lost
# without a word. And whoever has vanished is noticed after two minutes, not never.
_ASK_AFTER_S, _AGAIN_EVERY_S, _ASK_TIMES = 60, 15, 4


def keep_alive(sock: socket.socket) -> None:
    """For a TCP socket; it may be connected or not. A peer whose kernel answers is kept, however long it computes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _ASK_AFTER_S),
        ("TCP_KEEPINTVL", _AGAIN_EVERY_S),
        ("TCP_KEEPCNT", _ASK_TIMES),
    ):
        if hasattr(socket, name):  # else the system's own, mostly hours
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
