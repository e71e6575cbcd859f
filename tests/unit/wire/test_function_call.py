"""The call of farandole.run() on its way from the coordinator to an agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farandole.base.wire.function_call import LARGEST_BYTES, CallComes, CallPart, CallReceived, receive_call, send_call
from farandole.base.wire.link_messages import Stop
from farandole.base.wire.message import Message
from farandole.errors import ProtocolError


class Wire:
    """One direction is a queue for the messages of the other side."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.other: Wire = self

    def send(self, message: Message) -> None:
        self.sent.put_nowait(message)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def receive(self) -> Any:
        return await self.other.sent.get()


def wires() -> tuple[Wire, Wire]:
    one, two = Wire(), Wire()
    one.other, two.other = two, one
    return one, two


def test_a_call_larger_than_a_part_arrives_whole() -> None:
    async def test() -> None:
        coordinator, agent = wires()
        call = bytes(range(256)) * 12_000
        sending = asyncio.create_task(send_call(coordinator, call))
        assert await agent.receive() == CallComes(len(call))
        assert await receive_call(agent, len(call)) == call
        await sending

    asyncio.run(test())


@pytest.mark.parametrize("stray", [Stop("a test"), CallReceived(), CallPart(b"")])
def test_another_message_instead_of_a_part_is_refused(stray: Message) -> None:
    async def test() -> None:
        coordinator, agent = wires()
        coordinator.send(CallPart(b"12"))
        coordinator.send(stray)
        with pytest.raises(ProtocolError, match="after 2 of the 3 bytes"):
            await receive_call(agent, 3)

    asyncio.run(test())


def test_a_call_above_the_limit_is_refused_before_it_is_read() -> None:
    async def test() -> None:
        with pytest.raises(ProtocolError, match="at most"):
            await receive_call(wires()[1], LARGEST_BYTES + 1)

    asyncio.run(test())
