"""The entries of a job's store, and the clients that wait for them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

VALUE_BYTES = 8 << 20
"""The limit of torch's own server (TCPStoreLibUvBackend.cpp)."""
STORE_BYTES = 256 << 20
"""Bytes of all keys and values, of keys for which clients wait, of requests that have not been served, and of answers
that the kernel has not accepted."""

_BYTES_OF_AN_ENTRY = 128  # of Python's objects around a key and its value
_NUMBERS = range(-(2**63), 2**63)


class RequestRefused(Exception):
    """A request that is not served, with the reason. The connection is closed: the protocol has no errors."""


class WaitingClient(Protocol):
    """A client that waits for keys. Hashable by its identity."""

    def woken(self) -> None:
        """All keys for which the client waited are there."""


class StoreTable:
    """The entries of the store. A key can have a value and a queue."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes | bytearray] = {}  # the latter where something was appended
        self._queues: dict[bytes, deque[bytes]] = {}
        self._bytes = 0
        self._waiting: dict[bytes, dict[WaitingClient, None]] = {}  # in the order in which they came
        self._missing: dict[WaitingClient, set[bytes]] = {}

    def hold(self, number: int) -> None:
        """Count bytes, or fewer of them. Raises RequestRefused when there are too many."""
        if number > 0 and self._bytes + number > STORE_BYTES:
            raise RequestRefused(f"the store is full: it may hold {STORE_BYTES} bytes")
        self._bytes += number

    # Values

    def put(self, key: bytes, value: bytes) -> None:
        self._store(key, value)
        self._wake(key)

    def get(self, key: bytes) -> bytes | bytearray:
        """Return the value; empty when there is none."""
        return self._values.get(key, b"")

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes | bytearray:
        """Set the value if the present one, or an empty one in place of none, is `expected`. Return the value then; as
        torch does, `expected` where there is none."""
        present = self._values.get(key)
        if present is None and expected:
            return expected
        if present is None or present == expected:
            self.put(key, desired)
            return desired
        return present

    def add(self, key: bytes, amount: int) -> int:
        """Add to the number that the value is as text, 0 where there is none."""
        total = self._number(key) + amount
        if total not in _NUMBERS:
            raise RequestRefused(f"{total} does not fit into 64 bits")
        self.put(key, b"%d" % total)
        return total

    def append(self, key: bytes, data: bytes) -> None:
        """Append to the value, in time for the data alone: a request of some bytes must not copy a large value."""
        value = self.get(key)
        if (length := len(value) + len(data)) > VALUE_BYTES:
            raise RequestRefused(f"a value of {length} bytes, at most {VALUE_BYTES} are possible")
        if not isinstance(value, bytearray):
            value = bytearray(value)
            self._store(key, value)
        self.hold(len(data))
        value += data
        self._wake(key)

    def delete(self, key: bytes) -> int:
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self.hold(-_size(key, value))
        return 1

    def count(self) -> int:
        return len(self._values)

    def keys(self) -> Iterable[bytes]:
        return self._values

    def has_all(self, keys: Iterable[bytes]) -> bool:
        return all(self._has(key) for key in keys)

    # Queues

    def push(self, key: bytes, value: bytes) -> None:
        self.hold(_size(key, value))
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key, only_one=True)

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """Return the length of the queue and its first value, which is removed."""
        queue = self._queues.get(key)
        if queue is None:
            return 0, b""
        length, value = len(queue), queue.popleft()
        self.hold(-_size(key, value))
        if not queue:
            del self._queues[key]
        return length, value

    def queue_length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    # Waiting

    def wait(self, connection: WaitingClient, keys: Iterable[bytes]) -> bool:
        """Return whether all keys are there; otherwise `woken` of the connection is called once they are."""
        missing = {key for key in keys if not self._has(key)}
        if missing:
            self._await(connection, missing)
        return not missing

    def arrive(self, connection: WaitingClient, key: bytes, size: int) -> bool:
        """Count the arrival at a barrier of `size` clients. True for the last one, and the others are woken."""
        arrived = self._number(key) + 1
        self._store(key, b"%d" % arrived)
        if arrived < size:
            self._await(connection, {key})
            return False
        self._wake(key)
        return True

    def cancel(self, connection: WaitingClient) -> None:
        """The connection does not wait any more."""
        for key in self._missing.pop(connection, ()):
            self.hold(-_size(key))
            waiting = self._waiting[key]
            del waiting[connection]
            if not waiting:
                del self._waiting[key]

    def _await(self, connection: WaitingClient, missing: set[bytes]) -> None:
        self.cancel(connection)
        self.hold(sum(map(_size, missing)))
        self._missing[connection] = missing
        for key in missing:
            self._waiting.setdefault(key, {})[connection] = None

    def _wake(self, key: bytes, only_one: bool = False) -> None:
        """Wake the clients that wait for nothing else; of a queue's new value, which one of them gets, the first."""
        for connection in list(self._waiting.get(key, ())):
            missing = self._missing[connection]
            if only_one and len(missing) > 1:
                continue  # It will look at the queue when its other keys have come.
            missing.remove(key)
            self.hold(-_size(key))
            del self._waiting[key][connection]
            if not missing:
                del self._missing[connection]
                connection.woken()
                if only_one:
                    break
        if key in self._waiting and not self._waiting[key]:
            del self._waiting[key]

    def _store(self, key: bytes, value: bytes | bytearray) -> None:
        before = self._values.get(key)
        self.hold(_size(key, value) - (0 if before is None else _size(key, before)))
        self._values[key] = value

    def _has(self, key: bytes) -> bool:
        return key in self._values or key in self._queues

    def _number(self, key: bytes) -> int:
        text = self._values.get(key, b"0")
        try:
            return int(text)
        except ValueError:
            raise RequestRefused(f"the value of {key[:80]!r} is not a number: {bytes(text[:20])!r}") from None


def _size(key: bytes, value: bytes | bytearray = b"") -> int:
    return len(key) + len(value) + _BYTES_OF_AN_ENTRY
