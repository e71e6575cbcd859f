"""The operations of this rank that have not ended yet. Callers add them, the collectives' thread takes them."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterable, Sequence

from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Key
from farandole.fork_safety import close_at_fork


class Submitted:
    """A thread-safe table of submitted operations. After end() it accepts no more.

    `wake` is set while there are operations that were not sent yet; None where no thread waits for it.
    """

    def __init__(self, wake: Wake | None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._unsaid: list[Operation] = []
        self._in_flight: dict[Key, Operation] = {}
        self._error: BaseException | None = None

    @property
    def has_unsaid(self) -> bool:
        return bool(self._unsaid)

    @property
    def is_empty(self) -> bool:
        """True when no operation is waiting for its end."""
        return not self._in_flight

    def add(self, operations: Sequence[Operation]) -> None:
        """Add all of the operations or none.

        Raises ValueError for a name that is in flight, the error of end() if it was called, and RuntimeError in a
        forked child.
        """
        with self._lock:
            if self._error is not None:
                raise copy.copy(self._error) from self._error.__cause__
            by_key = {operation.key: operation for operation in operations}
            twice = [key for key in by_key if key in self._in_flight and not self._in_flight[key].has_ended]
            if twice or len(by_key) < len(operations):
                name = twice[0].name if twice else "a name of this group"
                raise ValueError(
                    f"{name} was submitted twice: an operation of this name is in flight. Call synchronize() on its "
                    f"handle first, or give this one another name"
                )
            self._set_wake()
            self._unsaid += operations
            self._in_flight |= by_key

    def wake(self) -> None:
        """Wake the collectives' thread for a check."""
        with self._lock:
            self._set_wake()

    def _set_wake(self) -> None:
        if self._wake is None:
            return
        try:
            self._wake.set()
        except OSError:
            raise RuntimeError(
                "collectives work only in the process that called init(), not in one forked from it (a loader worker?)"
            ) from None

    def take_unsaid(self) -> list[Operation]:
        """Take the operations that have not been sent to the other ranks."""
        with self._lock:
            if self._wake is not None:
                self._wake.clear()
            unsent, self._unsaid = self._unsaid, []
        for operation in unsent:
            operation.was_sent = True
        return unsent

    def find(self, key: Key) -> Operation | None:
        """Return the operation with this key, if it was sent to the other ranks."""
        operation = self._in_flight.get(key)
        return operation if operation is not None and operation.was_sent else None

    def in_flight(self) -> list[Operation]:
        with self._lock:
            return list(self._in_flight.values())

    def forget(self, ended: Iterable[Operation | None]) -> None:
        """Remove ended operations; a new one of the same name may have been submitted already."""
        with self._lock:
            for operation in ended:
                if operation is not None and self._in_flight.get(operation.key) is operation:
                    del self._in_flight[operation.key]

    def end(self, error: BaseException) -> None:
        """End all operations: waiting ones fail, and so do later ones."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting = [operation for operation in self._in_flight.values() if not operation.has_ended]
            self._in_flight.clear()
            self._unsaid.clear()
        for operation in waiting:
            operation.fail(error)


# The flag that wakes the collectives' thread --------------------------------------------------------------------------
#
# A thread can wait for it together with sockets: it is set by any thread, and visible as a readable descriptor.


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
