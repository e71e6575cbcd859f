"""Sockets that a forked child (a DataLoader's worker, say) must not keep: with a copy of them in a child, the
peers of a killed process would not see its end until the child is gone too."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_at_fork(connection: socket.socket) -> None:
    """Close this socket in every child that os.fork() makes from now on; the parent's stays open."""
    _sockets.add(connection)


def _close_all() -> None:
    for connection in list(_sockets):
        # Not shutdown(): that would end the parent's connection too.
        with contextlib.suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_all)
