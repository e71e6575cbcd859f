"""A flag that a thread can wait for together with sockets: set by any thread, visible as a readable descriptor."""

from __future__ import annotations

import socket

from farandole.fork_safety import close_at_fork


class Wake:
    """A flag with a descriptor. Not thread-safe by itself.

    set() and clear() are called under one lock, so that a set flag and a readable descriptor are always the same thing.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        close_at_fork(self._receiver)
        close_at_fork(self._sender)
        self._is_set = False

    @property
    def descriptor(self) -> int:
        return self._receiver.fileno()

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the flag. Raises OSError in a forked child: the thread to be woken stayed with the parent."""
        if not self._is_set:
            self._is_set = True  # first: a thread that finds the descriptor readable reads this without the lock
            self._sender.send(b"\0")

    def clear(self) -> None:
        if self._is_set:
            self._receiver.recv(1)
            self._is_set = False

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
