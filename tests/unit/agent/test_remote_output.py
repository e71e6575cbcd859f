"""Lines of workers on other machines: collected, bounded, and shown like those of this one."""

from __future__ import annotations

import asyncio

from farandole.base.wire.frames import AGENT_FRAME_LIMIT, AGENT_MESSAGES, decode, encode
from farandole.base.wire.message import Message
from farandole.base.wire.messages import WorkerPrinted, WorkerRanked, WorkerSilent
from farandole.job.agent.remote_agent import UNSENT_LIMIT, ForwardedOutput, RemoteOutput
from tests.support.waiting import run


class Wire:
    """Keeps what was sent; `unsent_bytes` as the test wants it."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        data = encode(message)
        assert len(data) < AGENT_FRAME_LIMIT
        self.sent.append(decode(AGENT_MESSAGES, data))


class Shown:
    """A Sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def expected(self, worker: str, rank: int) -> None:
        self.told.append(("expected", worker, rank))

    def placed(self, worker: str, rank: int) -> None:
        self.told.append(("placed", worker, rank))

    def line(self, worker: str, stream: str, data: bytes) -> None:
        self.told.append((worker, stream, data))

    def closed(self, worker: str) -> None:
        self.told.append(("closed", worker))


def test_what_a_worker_prints_is_shown_in_order_with_the_rank_that_it_had() -> None:
    async def test() -> None:
        wire, shown = Wire(), Shown()
        output, remote = ForwardedOutput(wire), RemoteOutput(shown)
        output.expected("w1", 1)
        output.line("w1", "stdout", b"one")
        output.line("w1", "stdout", b"\xff two")
        output.placed("w1", 1)
        output.line("w1", "stderr", b"three")
        output.closed("w1")
        for message in wire.sent:
            assert isinstance(message, WorkerPrinted | WorkerRanked | WorkerSilent)
            remote("b", message)
        assert shown.told == [
            ("expected", "w1", 1),
            ("w1", "stdout", b"one"),
            ("w1", "stdout", b"\xff two"),
            ("placed", "w1", 1),
            ("w1", "stderr", b"three"),
            ("closed", "w1"),
        ]

    run(test())


def test_many_lines_travel_in_few_messages_without_being_asked() -> None:
    async def test() -> None:
        wire = Wire()
        output = ForwardedOutput(wire)
        for number in range(1000):
            output.line("w1", "stdout", b"%d" % number)
        while not wire.sent:
            await asyncio.sleep(0.001)
        (printed,) = wire.sent
        assert isinstance(printed, WorkerPrinted)
        assert len(printed.lines) == 1000

    run(test())


def test_a_connection_that_takes_nothing_costs_lines_and_says_how_many_bytes() -> None:
    async def test() -> None:
        wire, shown = Wire(), Shown()
        output, remote = ForwardedOutput(wire), RemoteOutput(shown)
        wire.unsent_bytes = UNSENT_LIMIT + 1
        output.line("w1", "stdout", b"123456789")
        wire.unsent_bytes = 0
        output.line("w1", "stdout", b"again")
        output.flush()
        (printed,) = wire.sent
        assert printed == WorkerPrinted("w1", "stdout", (b"again",), dropped_bytes=10)
        remote("b", printed)
        assert b"10 bytes of output were dropped" in shown.told[0][2]

    run(test())


def test_workers_of_an_agent_that_is_lost_have_nothing_more_to_say() -> None:
    shown = Shown()
    remote = RemoteOutput(shown)
    remote("b", WorkerPrinted("w1", "stdout", (b"x",)))
    remote("b", WorkerPrinted("w2", "stdout", (b"x",)))
    remote("b", WorkerSilent("w2"))
    remote("c", WorkerPrinted("w3", "stdout", (b"x",)))
    remote("b", None)
    assert shown.told[-1] == ("closed", "w1")
    assert ("closed", "w3") not in shown.told
