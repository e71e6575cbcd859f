"""A command's connection to the coordinator of a running job. control_commands.py uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farandole.channel import Channel, connect
from farandole.clock import now_s
from farandole.control import AskStatus, ClientHello, ClientMessage, Status, ToClient
from farandole.deadline import within
from farandole.errors import FatalError
from farandole.membership import Address
from farandole.messages import PROTOCOL_VERSION
from farandole.wire import TO_CLIENT

ANSWER_S = 10.0
"""Seconds within which a coordinator must answer; it is busy for milliseconds at most."""

_LOOK_S = 0.1


class NoAnswer(FatalError):
    """The coordinator does not answer, or does not any more."""


class Client:
    """A connection made by `dial`, to be closed. Every call raises NoAnswer when there is no answer, and
    AuthenticationError or ProtocolError when the process that listens there does not know the token, or violates the
    protocol."""

    def __init__(self, channel: Channel[ToClient]) -> None:
        self._channel = channel

    @classmethod
    async def dial(cls, address: Address, token: bytes, job: str | None) -> Client:
        """Connect, with a proof of the token by both ends."""
        try:
            channel = await connect(address.host, address.port, token, job, TO_CLIENT)
        except OSError as error:
            raise NoAnswer(f"no job that this token belongs to answers at {address}: {error}") from None
        channel.send(ClientHello(PROTOCOL_VERSION))
        return cls(channel)

    async def ask(self, request: ClientMessage) -> ToClient:
        """Return the answer to one request."""
        self._channel.send(request)
        try:
            return await within(ANSWER_S, self._channel.receive())
        except ConnectionError:
            raise NoAnswer("the job has ended") from None
        except TimeoutError:
            raise NoAnswer(f"the coordinator did not answer within {ANSWER_S:g} s") from None

    async def status(self) -> Status:
        answer = await self.ask(AskStatus())
        if not isinstance(answer, Status):
            raise NoAnswer(f"the coordinator answered {type(answer).__name__} when asked for the status")
        return answer

    async def wait_until(self, condition: Callable[[Status], bool], timeout_s: float) -> Status:
        """Return the first status that fulfils the condition. Raises NoAnswer after `timeout_s` seconds, or when the
        job ends."""
        deadline_s = now_s() + timeout_s
        while not condition(status := await self.status()):
            if now_s() >= deadline_s:
                raise NoAnswer(f"it is not done after {timeout_s:g} s; the job goes on with it")
            await asyncio.sleep(_LOOK_S)
        return status

    def close(self) -> None:
        self._channel.close()
