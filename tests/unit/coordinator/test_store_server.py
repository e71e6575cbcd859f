"""The store on plain sockets: its answers, its limits, and what it does not serve. Torch's own clients are in
tests/integration/test_store.py."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from farandole.base.events.job_events import ConnectionRefused
from farandole.base.wire.listening import Strangers
from farandole.base.wire.peer_user import _is_supported
from farandole.errors import ConfigError
from farandole.job.coordinator import store_connection, store_server, store_table
from farandole.job.coordinator.store_connection import MAGIC, Query
from farandole.job.coordinator.store_server import StoreServer
from tests.support.waiting import EventLog, run

HELLO = bytes([Query.VALIDATE]) + struct.pack("<I", MAGIC)


def string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def integer(value: int) -> bytes:
    return struct.pack("<q", value)


class Client:
    """One end of a connection to the store."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes | Query) -> None:
        self.writer.write(b"".join(bytes([part]) if isinstance(part, Query) else part for part in parts))

    async def ask(self, *parts: bytes | Query, answer: int = 8) -> bytes:
        """Return the answer, which has this number of bytes."""
        self.send(*parts)
        return await self.reader.readexactly(answer)

    async def number(self, *parts: bytes | Query) -> int:
        value: int = struct.unpack("<q", await self.ask(*parts))[0]
        return value

    async def text(self, *parts: bytes | Query) -> bytes:
        (length,) = struct.unpack("<Q", await self.ask(*parts))
        return await self.reader.readexactly(length)

    async def is_closed(self) -> bool:
        """Whether the store has closed the connection; the test's deadline bounds the wait."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class Running:
    def __init__(self, store: StoreServer, events: EventLog) -> None:
        self.store, self.events = store, events
        self.clients: list[Client] = []

    async def connect(self, hello: bytes = HELLO) -> Client:
        client = Client(*await asyncio.open_connection(self.store.address.host, self.store.address.port))
        self.clients.append(client)
        client.send(hello)
        return client

    def refusals(self) -> list[str]:
        return [event.reason for event in self.events.of(ConnectionRefused)]


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    events = EventLog()
    store = StoreServer(events)
    await store.open("127.0.0.1")
    here = Running(store, events)
    try:
        yield here
    finally:
        store.close()
        for client in here.clients:
            client.writer.transport.abort()
        await asyncio.sleep(0)


def test_a_value_is_set_and_read_and_a_key_without_one_is_empty() -> None:
    async def test() -> None:
        async with running() as here:
            client = await here.connect()
            client.send(Query.SET, string(b"k"), string(b"value"))
            assert await client.text(Query.GET, string(b"k")) == b"value"
            assert await client.text(Query.GET, string(b"other")) == b""

    run(test())


def test_requests_may_arrive_byte_by_byte_and_many_at_once() -> None:
    async def test() -> None:
        async with running() as here:
            client = await here.connect(b"")
            request = HELLO + bytes([Query.ADD]) + string(b"n") + integer(2)
            for i in range(len(request)):
                client.send(request[i : i + 1])
                await asyncio.sleep(0)
            assert struct.unpack("<q", await client.reader.readexactly(8)) == (2,)
            client.send(*[bytes([Query.ADD]) + string(b"n") + integer(1)] * 3000)
            answers = struct.unpack("<3000q", await client.reader.readexactly(8 * 3000))
            assert answers == tuple(range(3, 3003))

    run(test())


def test_a_client_waits_for_all_its_keys_and_may_stop_waiting() -> None:
    async def test() -> None:
        async with running() as here:
            waiting, other = await here.connect(), await here.connect()
            waiting.send(Query.WAIT, integer(2), string(b"a"), string(b"b"))
            assert await waiting.ask(Query.PING, b"1234", answer=4) == b"1234"
            other.send(Query.SET, string(b"a"), string(b""))
            assert await other.ask(Query.CHECK, integer(2), string(b"a"), string(b"b"), answer=1) == b"\1"
            other.send(Query.SET, string(b"b"), string(b""))
            assert await waiting.reader.readexactly(1) == b"\0"
            waiting.send(Query.WAIT, integer(1), string(b"c"))
            assert await waiting.ask(Query.CANCEL_WAIT, answer=1) == b"\1"
            other.send(Query.SET, string(b"c"), string(b""))
            assert await waiting.number(Query.COUNT_KEYS) == 3, "no answer to the wait that was cancelled"

    run(test())


def test_a_new_value_of_a_queue_wakes_one_client() -> None:
    async def test() -> None:
        async with running() as here:
            first, second, other = [await here.connect() for _ in range(3)]
            for each in (first, second):
                each.send(Query.WAIT, integer(1), string(b"q"))
                await each.ask(Query.PING, b"1234", answer=4)
            other.send(Query.QUEUE_PUSH, string(b"q"), string(b"x"))
            assert await first.reader.readexactly(1) == b"\0"
            assert await second.ask(Query.CANCEL_WAIT, answer=1) == b"\1"
            assert await first.number(Query.QUEUE_POP, string(b"q")) == 1
            assert await first.reader.readexactly(9) == string(b"x")
            assert await first.number(Query.QUEUE_POP, string(b"q")) == 0
            assert await first.number(Query.QUEUE_LENGTH, string(b"q")) == 0

    run(test())


def test_a_client_that_is_gone_is_not_woken_and_its_memory_is_free() -> None:
    async def test() -> None:
        async with running() as here:
            gone, other = await here.connect(), await here.connect()
            gone.send(Query.WAIT, integer(1), string(b"k"))
            await gone.ask(Query.PING, b"1234", answer=4)
            gone.send(Query.SET, string(b"half"), struct.pack("<Q", 1000), b"x" * 500)
            gone.writer.transport.abort()
            while here.store.connections > 1:
                await asyncio.sleep(0)
            other.send(Query.SET, string(b"k"), string(b"v"))
            assert await other.text(Query.GET, string(b"k")) == b"v"
            assert here.store.table._missing == here.store.table._waiting == {}
            await other.number(Query.DELETE_KEY, string(b"k"))
            assert here.store.table._bytes == 0
            assert here.refusals() == []

    run(test())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ([Query.GET, struct.pack("<Q", 2**63)], "a string of 9223372036854775808 bytes, at most 8192 are possible"),
        ([Query.SET, string(b"k"), struct.pack("<Q", 1 << 40)], "at most 8388608 are possible"),
        ([Query.MULTI_GET, integer(1 << 60)], "keys, at most 131072 are possible"),
        ([Query.WAIT, integer(-1)], "a request with -1 keys"),
        ([Query.SET, string(b"k"), string(b"abc"), Query.ADD, string(b"k"), integer(1)], "is not a number: b'abc'"),
        ([Query.ADD, string(b"k"), integer(2**63 - 1), Query.ADD, string(b"k"), integer(1)], "into 64 bits"),
        ([b"\x63"], "it sent request number 99, which is unknown: torch 2.6 to 2.15 do not send it"),
        ([HELLO], "it sent request number 0, which is unknown"),
    ],
)
def test_an_impossible_request_ends_its_connection_with_a_log_line(request_: list[bytes | Query], reason: str) -> None:
    async def test() -> None:
        async with running() as here:
            client, other = await here.connect(), await here.connect()
            client.send(*request_)
            await client.reader.read()
            assert await client.is_closed()
            assert len(here.refusals()) == 1
            assert reason in here.refusals()[0]
            assert await other.number(Query.ADD, string(b"n"), integer(1)) == 1, "others are served"

    run(test())


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5, b"\x16\x03\x01\x02\x00\x01", b"\xff" * 70_000]
)
def test_garbage_is_refused_with_a_log_line(garbage: bytes) -> None:
    async def test() -> None:
        async with running() as here:
            client = await here.connect(garbage)
            assert await client.is_closed()
            assert here.refusals() == ["it does not speak the protocol of torch's TCPStore"]
            assert here.store.table._bytes == 0

    run(test())


def test_a_connection_that_says_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_connection, "VALIDATION_S", 0.05)

    async def test() -> None:
        async with running() as here:
            silent, slow = await here.connect(b""), await here.connect(b"\0")
            assert await silent.is_closed()
            assert await slow.is_closed()
            assert here.refusals() == ["it has not sent a first request within 0.05 s"], "a look at a port is no news"

    run(test())


def test_there_are_limits_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strangers.__init__, "__defaults__", (2,))
    monkeypatch.setattr(store_server, "CONNECTIONS_LIMIT", 4)

    async def test() -> None:
        async with running() as here:
            oldest, *strangers = [await here.connect(b"") for _ in range(3)]
            assert await oldest.is_closed()
            for each in strangers:
                assert await each.ask(HELLO, Query.PING, b"1234", answer=4) == b"1234"
            for _ in range(2):
                assert await (await here.connect()).ask(Query.PING, b"1234", answer=4) == b"1234"
            refused = await here.connect()
            assert await refused.is_closed()
            assert here.refusals() == ["4 other connections are open"]

    run(test())


def test_the_store_does_not_grow_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "STORE_BYTES", 5000)

    async def test() -> None:
        async with running() as here:
            client = await here.connect()
            assert await client.ask(Query.SET, string(b"first"), string(b"x"), Query.PING, b"1234", answer=4) == b"1234"
            for i in range(100):
                client.send(Query.SET, string(b"%d" % i), string(b"x" * 100))
            assert await client.is_closed()
            assert "the store is full: it may hold 5000 bytes" in here.refusals()[0]
            other = await here.connect()
            assert 0 < await other.number(Query.COUNT_KEYS) < 50

    run(test())


HALF_SET = [Query.MULTI_SET, integer(9), *[string(b"k") + string(b"x" * 700)] * 8]
LONG_WAIT = [Query.WAIT, integer(20), *[string(b"%d" % number + b"x" * 200) for number in range(20)]]


@pytest.mark.parametrize("request_", [HALF_SET, LONG_WAIT], ids=["a request that does not end", "a wait for many keys"])
def test_what_is_held_for_connections_counts_and_is_free_when_they_end(
    request_: list[bytes | Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_table, "STORE_BYTES", 20_000)

    async def test() -> None:
        async with running() as here:
            clients = [await here.connect() for _ in range(10)]
            for each in clients:
                each.send(*request_)
            while not here.refusals():
                await asyncio.sleep(0.001)
            assert "the store is full" in here.refusals()[0]
            for each in clients:
                each.writer.transport.abort()
            while here.store.connections:
                await asyncio.sleep(0)
            assert here.store.table._bytes == 0

    run(test())


def test_a_wait_that_is_over_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "STORE_BYTES", 5000)

    async def test() -> None:
        async with running() as here:
            waiting, other = await here.connect(), await here.connect()
            for number in range(100):
                waiting.send(Query.WAIT, integer(1), string(b"%d" % number))
                await waiting.ask(Query.PING, b"1234", answer=4)
                if number % 2:
                    await waiting.ask(Query.CANCEL_WAIT, answer=1)
                    continue
                other.send(Query.SET, string(b"%d" % number), string(b"x"))
                assert await waiting.reader.readexactly(1) == b"\0"
                await other.number(Query.DELETE_KEY, string(b"%d" % number))
            assert here.store.table._bytes == 0

    run(test())


def test_answers_that_are_not_read_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "STORE_BYTES", 40 << 20)

    async def test() -> None:
        async with running() as here:
            first = await here.connect()
            first.send(Query.SET, string(b"k"), string(b"x" * (8 << 20)))
            assert await first.number(Query.QUEUE_LENGTH, string(b"q")) == 0
            clients = [await here.connect() for _ in range(8)]
            for each in clients:
                each.reader._transport.pause_reading()  # type: ignore[attr-defined]
                each.send(Query.MULTI_GET, integer(3), *[string(b"k")] * 3)
            while not here.refusals():
                await asyncio.sleep(0.001)
            assert "the store is full" in here.refusals()[0]
            unsent = sum(each._transport.get_write_buffer_size() for each in here.store._connections)
            assert 0 < unsent <= 40 << 20
            for each in clients:
                each.writer.transport.abort()
            while here.store.connections > 1:
                await asyncio.sleep(0)
            assert await first.number(Query.DELETE_KEY, string(b"k")) == 1
            assert here.store.table._bytes == 0

    run(test())


def test_to_append_a_little_costs_little() -> None:
    """A copy of a value of 8 MB takes milliseconds, and a request to append to it has 18 bytes."""

    async def test() -> None:
        async with running() as here:
            client = await here.connect()
            client.send(Query.SET, string(b"k"), string(b"x" * ((8 << 20) - 1000)))
            assert await client.number(Query.QUEUE_LENGTH, string(b"q")) == 0
            began_s = time.process_time()
            for _ in range(90):
                bytearray(b"x") * (8 << 20)
            tenth_s = time.process_time() - began_s
            began_s = time.process_time()
            client.send(*[bytes([Query.APPEND]) + string(b"k") + string(b"y")] * 900)
            assert await client.number(Query.QUEUE_LENGTH, string(b"q")) == 0
            assert time.process_time() - began_s < 5 * tenth_s, "half of the values were copied"
            value = await client.text(Query.GET, string(b"k"))
            assert value == b"x" * ((8 << 20) - 1000) + b"y" * 900

    run(test())


def test_an_appended_value_and_an_answer_have_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "VALUE_BYTES", 1000)
    monkeypatch.setattr(store_connection, "REQUEST_BYTES", 3000)

    async def test() -> None:
        async with running() as here:
            client = await here.connect()
            client.send(*[bytes([Query.APPEND]) + string(b"k") + string(b"x" * 300)] * 4)
            assert await client.is_closed()
            client = await here.connect()
            client.send(Query.MULTI_GET, integer(10), *[string(b"k")] * 10)
            assert await client.is_closed()
            first, second = here.refusals()
            assert first == "a value of 1200 bytes, at most 1000 are possible"
            assert second == "an answer of 9000 bytes, at most 3000 are possible"

    run(test())


def test_a_client_that_does_not_read_its_answers_is_not_served_further() -> None:
    async def test() -> None:
        async with running() as here:
            client = await here.connect()
            client.send(Query.SET, string(b"k"), string(b"x" * (1 << 20)))
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            client.send(*[bytes([Query.GET]) + string(b"k")] * 200)
            client.send(Query.SET, string(b"end"), string(b""))
            other = await here.connect()
            for _ in range(100):
                assert await other.ask(Query.CHECK, integer(1), string(b"end"), answer=1) == b"\1"
            (connection,) = [each for each in here.store._connections if not each._is_writable]
            assert connection._transport.get_write_buffer_size() < 4 << 20
            client.reader._transport.resume_reading()  # type: ignore[attr-defined]
            await client.reader.readexactly(200 * ((1 << 20) + 8))
            assert await client.ask(Query.WAIT, integer(1), string(b"end"), answer=1) == b"\0"

    run(test())


def test_cleared_it_begins_anew_on_the_same_port() -> None:
    async def test() -> None:
        async with running() as here:
            client = await here.connect()
            assert await client.number(Query.ADD, string(b"n"), integer(5)) == 5
            here.store.clear()
            assert await client.is_closed()
            again = await here.connect()
            assert await again.number(Query.ADD, string(b"n"), integer(1)) == 1

    run(test())


def test_other_hosts_are_served_only_if_they_are_part_of_the_job() -> None:
    store = StoreServer(EventLog())
    store.admit("10.0.0.7")
    assert store.why_not("10.0.0.8") == "it comes from a host that is not part of the job"
    assert store.why_not("10.0.0.7") == store.why_not("127.0.0.1") == store.why_not("::1") == ""
    assert store.why_not("::ffff:127.0.0.1") == ""


def test_a_port_that_is_taken_is_an_error_with_advice() -> None:
    async def test() -> None:
        async with running() as here:
            other = StoreServer(EventLog())
            with pytest.raises(
                ConfigError, match=r"the store of torch.distributed cannot listen on 127.0.0.1 port \d+"
            ):
                await other.open("127.0.0.1", port=here.store.address.port)

    run(test())


@pytest.mark.skipif(os.geteuid() != 0 or not _is_supported(), reason="only root can become another user")
def test_another_user_of_this_machine_is_refused() -> None:
    """Otherwise every user could read and change what the groups of the job find each other by."""

    async def test() -> None:
        async with running() as here:
            os.seteuid(65534)
            try:
                other = await here.connect()
            finally:
                os.seteuid(0)
            assert await other.is_closed()
            assert here.refusals() == ["it is a process of another user, or has ended"]
            assert await (await here.connect()).ask(Query.PING, b"1234", answer=4) == b"1234"

    run(test())


def test_of_many_refused_connections_ten_are_reported_and_the_others_counted() -> None:
    async def test() -> None:
        async with running() as here:
            for _ in range(30):
                client = await here.connect(bytes(5))
                assert await client.reader.read() == b""
            assert len(here.refusals()) == 10
        assert [event.who for event in here.events.of(ConnectionRefused)][10:] == ["20 others"]

    run(test())
