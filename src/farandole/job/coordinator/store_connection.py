"""A client's connection to the store: requests in, answers out.

The protocol is that of torch 2.6 to 2.15 (torch/csrc/distributed/c10d: TCPStoreBackend.hpp has the queries,
TCPStore.cpp the client, TCPStoreLibUvBackend.cpp torch's own server).
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from farandole.job.coordinator import store_table
from farandole.job.coordinator.store_table import RequestRefused

if TYPE_CHECKING:
    from farandole.job.coordinator.store_server import StoreServer

MAGIC = 0x3C85F7CE
"""The number with which each client begins (validationMagicNumber in TCPStoreBackend.hpp)."""

# These two are limits of torch's own server (TCPStoreLibUvBackend.cpp).
KEY_BYTES = 8 << 10
KEYS_IN_A_REQUEST = 128 << 10
REQUEST_BYTES = 32 << 20
"""Bytes of one request, and of its answer."""
VALIDATION_S = 5.0
"""Seconds for a new connection to send the first number."""

_REQUESTS_AT_ONCE = 1_000  # of one connection, before others have their turn
_LONG, _UNSIGNED, _NONCE = struct.Struct("<q"), struct.Struct("<Q"), struct.Struct("<I")


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


class StoreConnection(asyncio.Protocol):
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
        except RequestRefused as refused:
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
        except (RequestRefused, StopIteration) as refused:
            self._refuse(str(refused))
            return
        if self._at:
            del self._incoming[: self._at]
            self._at = 0

    def _hold(self, number: int) -> None:
        """Count bytes of this connection, or fewer of them. Raises RequestRefused when there are too many."""
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
            raise RequestRefused("it does not speak the protocol of torch's TCPStore")
        self._hold(-self._taken)
        assert self._deadline is not None
        self._deadline.cancel()
        self._server.validated(self)
        served = 0
        while True:
            self._taken = 0
            kind = (yield from self._take(1))[0]
            if (request := _SERVED.get(kind)) is None:
                raise RequestRefused(
                    f"it sent request number {kind}, which is unknown: torch 2.6 to 2.15 do not send it"
                )
            readers, serve = request
            fields = []
            for read in readers:
                fields.append((yield from read(self)))
            serve(self, *fields)
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
            raise RequestRefused(f"a request of more than {REQUEST_BYTES} bytes")
        while len(self._incoming) - self._at < number:
            yield True
        self._at += number
        return bytes(self._incoming[self._at - number : self._at])

    def _bytes(self, most: int) -> Generator[bool, None, bytes]:
        """Read bytes after their number. The number alone makes no memory be taken."""
        (number,) = _UNSIGNED.unpack((yield from self._take(_UNSIGNED.size)))
        if number > most:
            raise RequestRefused(f"a string of {number} bytes, at most {most} are possible")
        return (yield from self._take(number))

    def _key(self) -> Generator[bool, None, bytes]:
        return (yield from self._bytes(KEY_BYTES))

    def _value(self) -> Generator[bool, None, bytes]:
        return (yield from self._bytes(store_table.VALUE_BYTES))

    def _integer(self) -> Generator[bool, None, int]:
        integer: int = _LONG.unpack((yield from self._take(_LONG.size)))[0]
        return integer

    def _count(self) -> Generator[bool, None, int]:
        number = yield from self._integer()
        if not 0 <= number <= KEYS_IN_A_REQUEST:
            raise RequestRefused(f"a request with {number} keys, at most {KEYS_IN_A_REQUEST} are possible")
        return number

    def _keys(self) -> Generator[bool, None, list[bytes]]:
        keys = []
        for _ in range((yield from self._count())):
            keys.append((yield from self._key()))
        return keys

    def _entries(self) -> Generator[bool, None, list[tuple[bytes, bytes]]]:
        entries = []
        for _ in range((yield from self._count())):
            key = yield from self._key()
            entries.append((key, (yield from self._value())))
        return entries

    def _echo(self) -> Generator[bool, None, bytes]:
        return (yield from self._take(_NONCE.size))

    def _put_all(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in entries:
            self._table.put(key, value)

    def _cancel_wait(self) -> None:
        self._table.cancel(self)
        self._transport.write(_WAIT_CANCELED)

    def _queue_pop(self, key: bytes) -> None:
        length, value = self._table.pop(key)
        self._answer_strings([value] if length else [], _LONG.pack(length))

    def _wake_if(self, is_there: bool) -> None:
        if is_there:
            self.woken()

    def _answer_number(self, number: int) -> None:
        self._transport.write(_LONG.pack(number))

    def _answer_strings(self, strings: Sequence[bytes | bytearray], head: bytes = b"") -> None:
        number = sum(len(each) for each in strings)
        if number > REQUEST_BYTES:
            raise RequestRefused(f"an answer of {number} bytes, at most {REQUEST_BYTES} are possible")
        parts = (part for each in strings for part in (_UNSIGNED.pack(len(each)), each))
        self._transport.write(head + b"".join(parts))


_Connection: TypeAlias = StoreConnection
_KEY, _VALUE, _INTEGER = _Connection._key, _Connection._value, _Connection._integer
_KEYS, _ENTRIES, _ECHO = _Connection._keys, _Connection._entries, _Connection._echo

_SERVED: Mapping[int, tuple[Sequence[Callable[[_Connection], Generator[bool, None, Any]]], Callable[..., object]]] = {
    Query.SET: ((_KEY, _VALUE), lambda it, key, value: it._table.put(key, value)),
    Query.COMPARE_SET: (
        (_KEY, _VALUE, _VALUE),
        lambda it, key, expected, desired: it._answer_strings([it._table.compare_set(key, expected, desired)]),
    ),
    Query.GET: ((_KEY,), lambda it, key: it._answer_strings([it._table.get(key)])),
    Query.ADD: ((_KEY, _INTEGER), lambda it, key, amount: it._answer_number(it._table.add(key, amount))),
    Query.CHECK: ((_KEYS,), lambda it, keys: it._transport.write(_READY if it._table.has_all(keys) else _NOT_READY)),
    Query.WAIT: ((_KEYS,), lambda it, keys: it._wake_if(it._table.wait(it, keys))),
    Query.COUNT_KEYS: ((), lambda it: it._answer_number(it._table.count())),
    Query.DELETE_KEY: ((_KEY,), lambda it, key: it._answer_number(it._table.delete(key))),
    Query.APPEND: ((_KEY, _VALUE), lambda it, key, value: it._table.append(key, value)),
    Query.MULTI_GET: ((_KEYS,), lambda it, keys: it._answer_strings([it._table.get(key) for key in keys])),
    Query.MULTI_SET: ((_ENTRIES,), _Connection._put_all),
    Query.CANCEL_WAIT: ((), _Connection._cancel_wait),
    Query.PING: ((_ECHO,), lambda it, nonce: it._transport.write(nonce)),
    Query.QUEUE_PUSH: ((_KEY, _VALUE), lambda it, key, value: it._table.push(key, value)),
    Query.QUEUE_POP: ((_KEY,), _Connection._queue_pop),
    Query.QUEUE_LENGTH: ((_KEY,), lambda it, key: it._answer_number(it._table.queue_length(key))),
    Query.LIST_KEYS: ((), lambda it: it._answer_strings(list(it._table.keys()), _LONG.pack(it._table.count()))),
    Query.BARRIER: ((_KEY, _INTEGER), lambda it, key, size: it._wake_if(it._table.arrive(it, key, size))),
}
"""By kind: how to read the fields of a request, and what serves them."""
