"""Helpers for sockets: keep an idle connection alive, and wait until a descriptor is ready."""

from __future__ import annotations

import select
import socket
from typing import Protocol

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


# Waiting for one descriptor -------------------------------------------------------------------------------------------
#
# select() accepts only descriptors with numbers below 1024; poll() accepts all.


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def can_read(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Return whether a read would not block: there is data, or the end.

    Waits for up to `within_s` seconds, for ever with None. Raises ValueError for a closed descriptor.
    """
    return _is_ready(descriptor, select.POLLIN, within_s)


def can_write(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Return whether a write would not block, or would fail; waits as can_read() does."""
    return _is_ready(descriptor, select.POLLOUT, within_s)


def _is_ready(descriptor: int | HasDescriptor, event: int, within_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if within_s is None else 1000 * within_s))
