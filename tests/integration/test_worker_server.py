"""Whom an agent serves on its unix socket, and whom it hangs up on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from farandole.base.membership import DataAddress
from farandole.base.wire.frames import TO_WORKER, WORKER_FRAME_LIMIT, FrameBuffer, decode, encode, frame
from farandole.base.wire.link_messages import Abort, Finished, Hello, Ready, Stop, WorkerMessage
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.job.agent import worker_server
from farandole.job.agent.worker_server import WorkerServer
from tests.support.waiting import DEADLINE_S, run


class Served:
    """A server, what it was told, and workers' ends of connections to it."""

    def __init__(self, has_abstract_sockets: bool) -> None:
        self.heard: asyncio.Queue[tuple[str, WorkerMessage]] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.server = WorkerServer(
            lambda worker, message: self.heard.put_nowait((worker, message)),
            lambda who, reason: self.refused.put_nowait(f"{who}: {reason}"),
            has_abstract_sockets,
        )
        self.server.start()
        self.secret = self.server.expect("w1")
        self._writers: list[asyncio.StreamWriter] = []

    def hello(self) -> Hello:
        return Hello("w1", self.secret, 1, PROTOCOL_VERSION, DataAddress("127.0.0.1", 1))

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self.server.address
        path = "\0" + address[1:] if address.startswith("@") else address
        reader, writer = await asyncio.open_unix_connection(path)
        self._writers.append(writer)
        return reader, writer

    async def say_hello(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.dial()
        writer.write(frame(encode(self.hello())))
        await self.next_message()
        return reader, writer

    async def next_message(self) -> tuple[str, WorkerMessage]:
        return await asyncio.wait_for(self.heard.get(), DEADLINE_S)

    async def next_refusal(self) -> str:
        return await asyncio.wait_for(self.refused.get(), DEADLINE_S)

    def stop(self) -> None:
        self.server.stop()
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(has_abstract_sockets: bool = True) -> AsyncIterator[Served]:
    served = Served(has_abstract_sockets)
    try:
        yield served
    finally:
        served.stop()


@pytest.mark.parametrize("has_abstract_sockets", [True, False])
def test_a_worker_with_its_secret_is_heard_and_told(has_abstract_sockets: bool) -> None:
    async def test() -> None:
        async with serving(has_abstract_sockets) as served:
            reader, writer = await served.dial()
            writer.write(frame(encode(served.hello())) + frame(encode(Ready(3))))
            assert await served.next_message() == ("w1", msgspec.structs.replace(served.hello(), secret=""))
            assert await served.next_message() == ("w1", Ready(3))
            served.server.send_to(["w1"], Abort(4, "a test"))
            (payload,) = FrameBuffer(1000).feed(await asyncio.wait_for(reader.read(1000), DEADLINE_S))
            assert decode(TO_WORKER, payload) == Abort(4, "a test")

    run(test())


def test_without_abstract_sockets_only_this_user_can_reach_the_file_and_it_is_removed() -> None:
    async def test() -> None:
        async with serving(has_abstract_sockets=False) as served:
            folder = Path(served.server.address).parent
            assert folder.stat().st_mode & 0o777 == 0o700
        assert not folder.exists()

    run(test())


def changed(hello: Hello, **fields: object) -> bytes:
    return frame(encode(msgspec.structs.replace(hello, **fields)))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("secret", "a process on the agent's socket: it did not send the secret of worker w1"),
        ("worker", "it did not send the secret of worker w2"),
        ("version", f"uses version 99 of the protocol, its agent version {PROTOCOL_VERSION}"),
        ("no hello", "it sent Ready before Hello"),
        ("second hello", "worker w1: it sent Hello twice"),
        ("garbage", "not a valid message"),
        ("oversized", "at most 16384 are allowed here"),
    ],
)
def test_who_says_what_a_worker_must_not_say_is_hung_up_on(case: str, reason: str) -> None:
    async def test() -> None:
        async with serving() as served:
            hello = served.hello()
            said = {
                "secret": changed(hello, secret="é"),
                "worker": changed(hello, worker="w2"),
                "version": changed(hello, version=99),
                "no hello": frame(encode(Ready(1))),
                "second hello": 2 * changed(hello),
                "garbage": frame(b"garbage"),
                "oversized": b"\xff\xff\xff\xff",
            }
            reader, writer = await served.dial()
            writer.write(said[case])
            assert reason in await served.next_refusal()
            with contextlib.suppress(ConnectionResetError):  # when bytes were left unread
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""

    run(test())


def test_a_process_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_server, "HELLO_DEADLINE_S", 0.1)

    async def test() -> None:
        async with serving() as served:
            reader, _ = await served.dial()
            assert "sent no Hello within 0.1 s" in await served.next_refusal()
            assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""

    run(test())


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    own = os.geteuid()
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_hung_up_on() -> None:
    async def test() -> None:
        async with serving() as served:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, as_another_user():
                other.connect(b"\0" + served.server.address[1:].encode())
                assert "a process of another user" in await served.next_refusal()

    run(test())


def test_a_child_that_inherited_the_secret_cannot_take_the_workers_place() -> None:
    async def test() -> None:
        async with serving() as served:
            _, first = await served.say_hello()
            _, second = await served.dial()
            second.write(frame(encode(served.hello())))
            assert "worker w1 is connected already" in await served.next_refusal()
            first.write(frame(encode(Ready(1))))
            assert await served.next_message() == ("w1", Ready(1))

    run(test())


def test_what_was_written_before_the_process_ended_is_heard_at_once() -> None:
    async def test() -> None:
        async with serving() as served:
            _, writer = await served.say_hello()
            writer.write(frame(encode(Finished(1))))
            served.server.dismiss("w1")
            assert served.heard.get_nowait() == ("w1", Finished(1))

    run(test())


def test_a_message_larger_than_the_kernels_buffer_arrives_whole() -> None:
    async def test() -> None:
        async with serving() as served:
            reader, _ = await served.say_hello()
            stop = Stop("x" * (WORKER_FRAME_LIMIT - 100))
            expected = frame(encode(stop))
            served.server.send_to(["w1"], stop)
            assert await asyncio.wait_for(reader.readexactly(len(expected)), DEADLINE_S) == expected
            served.server.send_to(["w1"], Abort(1, "and more"))
            more = frame(encode(Abort(1, "and more")))
            assert await asyncio.wait_for(reader.readexactly(len(more)), DEADLINE_S) == more

    run(test())


def test_a_worker_that_never_reads_is_hung_up_on() -> None:
    async def test() -> None:
        async with serving() as served:
            await served.say_hello()
            for _ in range(6):  # without a pause, so that nobody reads
                served.server.send_to(["w1"], Stop("x" * (WORKER_FRAME_LIMIT - 100)))
            assert "it has not read" in await served.next_refusal()

    run(test())
