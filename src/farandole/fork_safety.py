"""Close sockets that a forked child must not keep. Collectives and the control link register theirs here.

A DataLoader worker is a fork of its training process. While it holds copies of the process's sockets, the peers cannot
detect the death of the process: end-of-file comes only when the last copy is closed. (With two loader workers, peers
detected it 4 s after a kill -9.)
"""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_sockets: WeakSet[socket.socket] = WeakSet()


def close_at_fork(sock: socket.socket) -> None:
    """Have a forked child close its copy of `sock` before any other code runs in it.

    Only the child's descriptor is closed; the connection of the parent is not affected. Using `sock` in the child
    raises OSError.
    """
    _sockets.add(sock)


def _close_in_child() -> None:
    for sock in list(_sockets):
        # Not sock.close(): that keeps the descriptor for as long as a file made from the socket is open.
        descriptor = sock.detach()
        if descriptor >= 0:
            os.close(descriptor)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_close_in_child)
