"""The store of a job: a server for torch's TCPStore clients, at MASTER_ADDR:MASTER_PORT of each worker. server.py opens
it in the coordinator's process, so that it outlives all workers.

It speaks the protocol of torch 2.6 to 2.15 (torch/csrc/distributed/c10d: TCPStoreBackend.hpp has the queries,
TCPStore.cpp the client, TCPStoreLibUvBackend.cpp torch's own server). The protocol has no authentication: whoever may
connect may read and write. So it listens on loopback, or only serves the hosts of the job's agents.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

from farandole.base.events import ConnectionRefused
from farandole.base.membership import Address
from farandole.base.wire.listening import REPORTS_EVERY_S, FailureBudget, Listener, RefusalReports, Strangers
from farandole.base.wire.peer_user import is_of_another_user
from farandole.base.wire.sockets import listening_sockets
from farandole.errors import ConfigError

MAGIC = 0x3C85F7CE
"""The number with which each client begins (validationMagicNumber in TCPStoreBackend.hpp)."""

# The first three are the limits of torch's own server (TCPStoreLibUvBackend.cpp).
KEY_BYTES = 8 << 10
VALUE_BYTES = 8 << 20
KEYS_IN_A_REQUEST = 128 << 10
REQUEST_BYTES = 32 << 20
"""Bytes of one request, and of its answer."""
STORE_BYTES = 256 << 20
"""Bytes of all keys and values, of keys for which clients wait, of requests that have not been served, and of answers
that the kernel has not accepted."""
CONNECTIONS_LIMIT = 16_384
VALIDATION_S = 5.0
"""Seconds for a new connection to send the first number."""

_BYTES_OF_AN_ENTRY = 128  # of Python's objects around a key and its value
_REQUESTS_AT_ONCE = 1_000  # of one connection, before others have their turn
_LONG, _UNSIGNED, _NONCE = struct.Struct("<q"), struct.Struct("<Q"), struct.Struct("<I")
_NUMBERS = range(-(2**63), 2**63)


class Query(enum.IntEnum):
    """The kinds of requests: QueryType in TCPStoreBackend.hpp."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    COUNT_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LENGTH = 16
    LIST_KEYS = 17
    BARRIER = 18


# Answers of one byte: CheckResponseType and WaitResponseType.
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"


class _Refused(Exception):
    """A request that is not served, with the reason. The connection is closed: the protocol has no errors."""


class Store(Protocol):
    """The part of StoreServer that a coordinator needs."""

    async def open(self, *hosts: str) -> None: ...

    @property
    def address(self) -> Address: ...

    def admit(self, host: str) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class StoreServer:
    """The server, used on one event loop: `await open()`, then `close()`.

    Args:
        on_event: Gets a ConnectionRefused for a connection that was closed for a violation: of many only some, and
            their number.
    """

    def __init__(self, on_event: Callable[[ConnectionRefused], None]) -> None:
        self._reports = RefusalReports(on_event)
        self._flushing: asyncio.TimerHandle | None = None
        self._admitted: set[str] = set()
        self._budget = FailureBudget()
        self._listener = Listener(self._on_connection, self._budget)
        self._table = _Table()
        self._connections: set[_Connection] = set()
        self._strangers: Strangers[_Connection] = Strangers(_Connection.close, self._budget)
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, *hosts: str, port: int = 0) -> None:
        """Listen on one port of these addresses; port 0 lets the system choose. Raises ConfigError when that fails. A
        later call adds addresses."""
        known = self._listener.addresses
        try:
            sockets = listening_sockets(hosts, known[0].port if known else port)
        except OSError as error:
            raise ConfigError(
                f"the store of torch.distributed cannot listen on {' and '.join(hosts)} port {port}: {error.strerror}; "
                "choose another port, or let the system choose a free one"
            ) from error
        self._listener.open(sockets)

    @property
    def address(self) -> Address:
        """The first address at which it listens."""
        assert self._listener.addresses, "call open() first"
        return self._listener.addresses[0]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses at which it listens."""
        return self._listener.addresses

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def admit(self, host: str) -> None:
        """Serve the host of this address, too: it is one of the job's. Loopback is always served."""
        self._admitted.add(host)

    def clear(self) -> None:
        """Forget all entries and close all connections: for workers that are all started anew, on the same port."""
        for connection in list(self._connections):
            connection.close()
        self._table = _Table()

    def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        self._listener.close()
        self.clear()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._reports.finish()

    def _on_connection(self, connected: socket.socket, who: str) -> None:
        is_stranger = is_of_another_user(connected)
        another = "it is a process of another user, or has ended"
        if reason := another if is_stranger else self.why_not(who.rpartition(":")[0]):
            if not _has_only_looked(connected):
                self.refused(who, reason)
            connected.close()
            self._budget.count()
            return
        loop = asyncio.get_running_loop()
        opening = loop.create_task(self._open(connected))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connected: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _Connection(self), connected)

    # From the connections ---------------------------------------------------------------------------------

    @property
    def table(self) -> _Table:
        return self._table

    def why_not(self, host: str) -> str:
        """Return why a new connection from this host is refused; empty if it is accepted."""
        if not (_is_loopback(host) or host in self._admitted):
            return "it comes from a host that is not part of the job"
        if len(self._connections) >= CONNECTIONS_LIMIT:
            return f"{CONNECTIONS_LIMIT} other connections are open"
        return ""

    def opened(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self._strangers.add(connection)

    def validated(self, connection: _Connection) -> None:
        self._strangers.proved(connection)

    def closed(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._strangers.failed(connection)

    def refused(self, peer: str, reason: str) -> None:
        self._reports(ConnectionRefused(f"{peer} to the store of torch.distributed", reason))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(REPORTS_EVERY_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self._reports.finish()


def _has_only_looked(connected: socket.socket) -> bool:
    """Return whether a connection has ended without a byte, as those that test a port do."""
    try:
        return connected.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


# The entries, and the clients that wait for them ----------------------------------------------------------------------


class _Table:
    """The entries of the store. A key can have a value and a queue."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes | bytearray] = {}  # the latter where something was appended
        self._queues: dict[bytes, deque[bytes]] = {}
        self._bytes = 0
        self._waiting: dict[bytes, dict[_Connection, None]] = {}  # in the order in which they came
        self._missing: dict[_Connection, set[bytes]] = {}

    def hold(self, number: int) -> None:
        """Count bytes, or fewer of them. Raises _Refused when there are too many."""
        if number > 0 and self._bytes + number > STORE_BYTES:
            raise _Refused(f"the store is full: it may hold {STORE_BYTES} bytes")
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
            raise _Refused(f"{total} does not fit into 64 bits")
        self.put(key, b"%d" % total)
        return total

    def append(self, key: bytes, data: bytes) -> None:
        """Append to the value, in time for the data alone: a request of some bytes must not copy a large value."""
        value = self.get(key)
        if (length := len(value) + len(data)) > VALUE_BYTES:
            raise _Refused(f"a value of {length} bytes, at most {VALUE_BYTES} are possible")
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

    def wait(self, connection: _Connection, keys: Iterable[bytes]) -> bool:
        """Return whether all keys are there; otherwise `woken` of the connection is called once they are."""
        missing = {key for key in keys if not self._has(key)}
        if missing:
            self._await(connection, missing)
        return not missing

    def arrive(self, connection: _Connection, key: bytes, size: int) -> bool:
        """Count the arrival at a barrier of `size` clients. True for the last one, and the others are woken."""
        arrived = self._number(key) + 1
        self._store(key, b"%d" % arrived)
        if arrived < size:
            self._await(connection, {key})
            return False
        self._wake(key)
        return True

    def cancel(self, connection: _Connection) -> None:
        """The connection does not wait any more."""
        for key in self._missing.pop(connection, ()):
            self.hold(-_size(key))
            waiting = self._waiting[key]
            del waiting[connection]
            if not waiting:
                del self._waiting[key]

    def _await(self, connection: _Connection, missing: set[bytes]) -> None:
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
            raise _Refused(f"the value of {key[:80]!r} is not a number: {bytes(text[:20])!r}") from None


def _size(key: bytes, value: bytes | bytearray = b"") -> int:
    return len(key) + len(value) + _BYTES_OF_AN_ENTRY


# A client's connection: requests in, answers out ----------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """A connection. Its requests are read by a generator, which stops where bytes are missing: so a request that
    arrives in many pieces is read only once."""

    def __init__(self, server: StoreServer) -> None:
        self._server, self._table = server, server.table
        self._incoming = bytearray()
        self._at = 0  # what was read of it
        self._taken = 0  # bytes of the request that is being read
        self._held = 0  # bytes that the table counts: of requests that were not served, or of answers
        self._is_writable, self._is_open = True, False
        self._is_scheduled = False
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._reading = self._read()

    # asyncio's calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        self._peer = f"{host}:{port}"
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._is_open = True
        self._server.opened(self)
        self._deadline = self._loop.call_later(VALIDATION_S, self._is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def pause_writing(self) -> None:
        """Serve no further request while the client does not read its answers."""
        self._is_writable = False
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_writable = True
        if self._is_open:
            self._transport.resume_reading()
            self._advance()

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            return
        try:
            self._hold(len(data))
        except _Refused as refused:
            self._refuse(str(refused))
            return
        self._incoming += data
        self._advance()

    # The server's calls -----------------------------------------------------------------------------------

    def woken(self) -> None:
        """All keys for which the client waited are there."""
        self._transport.write(_STOP_WAITING)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._is_open:
            self._end()
            self._transport.abort()

    # Requests ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._table.cancel(self)
        self._hold(-self._held)
        self._incoming.clear()
        self._reading.close()
        self._server.closed(self)

    def _is_late(self) -> None:
        """Close a connection that has not begun as a client does. A port that was only looked at is no news."""
        if self._incoming:
            self._refuse(f"it has not sent a first request within {VALIDATION_S:g} s")
        else:
            self.close()

    def _refuse(self, reason: str) -> None:
        self._server.refused(self._peer, reason)
        self.close()

    def _advance(self) -> None:
        """Serve the requests that have arrived, some of them now."""
        self._is_scheduled = False
        if not self._is_open:
            return
        try:
            if not next(self._reading):
                self._schedule()
        except (_Refused, StopIteration) as refused:
            self._refuse(str(refused))
            return
        if self._at:
            del self._incoming[: self._at]
            self._at = 0

    def _hold(self, number: int) -> None:
        """Count bytes of this connection, or fewer of them. Raises _Refused when there are too many."""
        self._table.hold(number)
        self._held += number

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._advance)

    def _read(self) -> Generator[bool, None, None]:
        """Read and serve requests for ever. Yields True where more bytes, or a reader of the answers, are needed, and
        False where it is the turn of others."""
        first = yield from self._take(1 + _NONCE.size)
        if first != bytes([Query.VALIDATE]) + _NONCE.pack(MAGIC):
            raise _Refused("it does not speak the protocol of torch's TCPStore")
        self._hold(-self._taken)
        assert self._deadline is not None
        self._deadline.cancel()
        self._server.validated(self)
        served = 0
        while True:
            self._taken = 0
            kind = (yield from self._take(1))[0]
            if (serve := _SERVED.get(kind)) is None:
                raise _Refused(f"it sent request number {kind}, which is unknown: torch 2.6 to 2.15 do not send it")
            yield from serve(self)
            self._hold(-self._taken)
            if not self._is_writable:
                unsent = self._transport.get_write_buffer_size()
                self._hold(unsent)
                while not self._is_writable:
                    yield True
                self._hold(-unsent)
            served += 1
            if served % _REQUESTS_AT_ONCE == 0:
                yield False

    def _take(self, number: int) -> Generator[bool, None, bytes]:
        """Read this number of bytes."""
        self._taken += number
        if self._taken > REQUEST_BYTES:
            raise _Refused(f"a request of more than {REQUEST_BYTES} bytes")
        while len(self._incoming) - self._at < number:
            yield True
        self._at += number
        return bytes(self._incoming[self._at - number : self._at])

    def _bytes(self, most: int) -> Generator[bool, None, bytes]:
        """Read bytes after their number. The number alone makes no memory be taken."""
        (number,) = _UNSIGNED.unpack((yield from self._take(_UNSIGNED.size)))
        if number > most:
            raise _Refused(f"a string of {number} bytes, at most {most} are possible")
        return (yield from self._take(number))

    def _key(self) -> Generator[bool, None, bytes]:
        return (yield from self._bytes(KEY_BYTES))

    def _value(self) -> Generator[bool, None, bytes]:
        return (yield from self._bytes(VALUE_BYTES))

    def _integer(self) -> Generator[bool, None, int]:
        integer: int = _LONG.unpack((yield from self._take(_LONG.size)))[0]
        return integer

    def _count(self) -> Generator[bool, None, int]:
        number = yield from self._integer()
        if not 0 <= number <= KEYS_IN_A_REQUEST:
            raise _Refused(f"a request with {number} keys, at most {KEYS_IN_A_REQUEST} are possible")
        return number

    def _keys(self) -> Generator[bool, None, list[bytes]]:
        keys = []
        for _ in range((yield from self._count())):
            keys.append((yield from self._key()))
        return keys

    def _set(self) -> Generator[bool, None, None]:
        key = yield from self._key()
        self._table.put(key, (yield from self._value()))

    def _compare_set(self) -> Generator[bool, None, None]:
        key = yield from self._key()
        expected = yield from self._value()
        desired = yield from self._value()
        self._answer_strings([self._table.compare_set(key, expected, desired)])

    def _get(self) -> Generator[bool, None, None]:
        self._answer_strings([self._table.get((yield from self._key()))])

    def _add(self) -> Generator[bool, None, None]:
        key = yield from self._key()
        amount = yield from self._integer()
        self._transport.write(_LONG.pack(self._table.add(key, amount)))

    def _check(self) -> Generator[bool, None, None]:
        keys = yield from self._keys()
        self._transport.write(_READY if self._table.has_all(keys) else _NOT_READY)

    def _wait(self) -> Generator[bool, None, None]:
        if self._table.wait(self, (yield from self._keys())):
            self.woken()

    def _count_keys(self) -> Generator[bool, None, None]:
        self._transport.write(_LONG.pack(self._table.count()))
        yield from ()

    def _delete_key(self) -> Generator[bool, None, None]:
        self._transport.write(_LONG.pack(self._table.delete((yield from self._key()))))

    def _append(self) -> Generator[bool, None, None]:
        key = yield from self._key()
        self._table.append(key, (yield from self._value()))

    def _multi_get(self) -> Generator[bool, None, None]:
        keys = yield from self._keys()
        self._answer_strings([self._table.get(key) for key in keys])

    def _multi_set(self) -> Generator[bool, None, None]:
        entries = []
        for _ in range((yield from self._count())):
            key = yield from self._key()
            entries.append((key, (yield from self._value())))
        for key, value in entries:
            self._table.put(key, value)

    def _cancel_wait(self) -> Generator[bool, None, None]:
        self._table.cancel(self)
        self._transport.write(_WAIT_CANCELED)
        yield from ()

    def _ping(self) -> Generator[bool, None, None]:
        self._transport.write((yield from self._take(_NONCE.size)))

    def _queue_push(self) -> Generator[bool, None, None]:
        key = yield from self._key()
        self._table.push(key, (yield from self._value()))

    def _queue_pop(self) -> Generator[bool, None, None]:
        length, value = self._table.pop((yield from self._key()))
        self._answer_strings([value] if length else [], _LONG.pack(length))

    def _queue_length(self) -> Generator[bool, None, None]:
        self._transport.write(_LONG.pack(self._table.queue_length((yield from self._key()))))

    def _list_keys(self) -> Generator[bool, None, None]:
        self._answer_strings(list(self._table.keys()), _LONG.pack(self._table.count()))
        yield from ()

    def _barrier(self) -> Generator[bool, None, None]:
        key = yield from self._key()
        size = yield from self._integer()
        if self._table.arrive(self, key, size):
            self.woken()

    def _answer_strings(self, strings: Sequence[bytes | bytearray], head: bytes = b"") -> None:
        number = sum(len(each) for each in strings)
        if number > REQUEST_BYTES:
            raise _Refused(f"an answer of {number} bytes, at most {REQUEST_BYTES} are possible")
        parts = (part for each in strings for part in (_UNSIGNED.pack(len(each)), each))
        self._transport.write(head + b"".join(parts))


_SERVED: dict[int, Callable[[_Connection], Generator[bool, None, None]]] = {
    Query.SET: _Connection._set,
    Query.COMPARE_SET: _Connection._compare_set,
    Query.GET: _Connection._get,
    Query.ADD: _Connection._add,
    Query.CHECK: _Connection._check,
    Query.WAIT: _Connection._wait,
    Query.COUNT_KEYS: _Connection._count_keys,
    Query.DELETE_KEY: _Connection._delete_key,
    Query.APPEND: _Connection._append,
    Query.MULTI_GET: _Connection._multi_get,
    Query.MULTI_SET: _Connection._multi_set,
    Query.CANCEL_WAIT: _Connection._cancel_wait,
    Query.PING: _Connection._ping,
    Query.QUEUE_PUSH: _Connection._queue_push,
    Query.QUEUE_POP: _Connection._queue_pop,
    Query.QUEUE_LENGTH: _Connection._queue_length,
    Query.LIST_KEYS: _Connection._list_keys,
    Query.BARRIER: _Connection._barrier,
}
