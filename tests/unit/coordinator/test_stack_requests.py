"""Each worker whose stacks are asked for is answered for, once, at the latest at the deadline."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from farandole.base.wire.channel import Channel
from farandole.base.wire.control import ClientMessage, StacksOfWorker
from farandole.base.wire.message import Message
from farandole.base.wire.messages import StacksWritten
from farandole.job.coordinator.command_server import StackRequests
from tests.support.waiting import run


class Connection:
    """Keeps what is sent to a command."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def channel(self) -> Channel[ClientMessage]:
        return cast(Any, self)


class Agents:
    """Keeps what agents are asked; the agent of a worker whose name begins with x is not connected."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def ask(self, worker: str, number: int) -> str:
        if worker.startswith("x"):
            return "its agent is not connected"
        self.asked.append((worker, number))
        return ""


def test_answers_go_to_those_who_have_asked() -> None:
    async def main() -> None:
        agents, one, two = Agents(), Connection(), Connection()
        requests = StackRequests(agents.ask)
        requests.begin(one.channel, ["w0", "x", "w1"])
        requests.begin(two.channel, ["w0"])
        assert agents.asked == [("w0", 1), ("w1", 3), ("w0", 4)]
        assert one.sent == [StacksOfWorker("x", "", "its agent is not connected")]
        requests.on_written(StacksWritten(4, "w0", "second"))
        requests.on_written(StacksWritten(1, "w0", "first"))
        requests.on_written(StacksWritten(3, "w1", "", "it is stopped"))
        assert two.sent == [StacksOfWorker("w0", "second")]
        assert one.sent[1:] == [StacksOfWorker("w0", "first"), StacksOfWorker("w1", "", "it is stopped")]

    run(main())


def test_answers_that_come_twice_for_another_worker_or_for_nobody_are_dropped() -> None:
    async def main() -> None:
        agents, one = Agents(), Connection()
        requests = StackRequests(agents.ask)
        requests.begin(one.channel, ["w0", "w1"])
        requests.on_written(StacksWritten(1, "w1", "of another"))
        requests.on_written(StacksWritten(9, "w0", "of nobody"))
        requests.on_written(StacksWritten(1, "w0", "text"))
        requests.on_written(StacksWritten(1, "w0", "text"))
        requests.forget(one.channel)
        requests.on_written(StacksWritten(2, "w1", "too late"))
        assert one.sent == [StacksOfWorker("w0", "text")]

    run(main())


def test_an_agent_that_does_not_answer_is_answered_for() -> None:
    async def main() -> None:
        agents, one = Agents(), Connection()
        StackRequests(agents.ask, deadline_s=0.01).begin(one.channel, ["w0"])
        while not one.sent:
            await asyncio.sleep(0.005)
        assert one.sent == [StacksOfWorker("w0", "", "its agent has not answered within 0.01 s")]

    run(main())
