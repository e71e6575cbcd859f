"""The requests of commands for the stacks of workers: each gets an answer for each worker, at a deadline at the latest.
command_server.py holds them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from farandole.base.wire.channel import Channel
from farandole.base.wire.control import STACKS_S, ClientMessage, StacksOfWorker
from farandole.base.wire.messages import StacksWritten

_AGENT_S = 0.8 * STACKS_S  # an agent answers by itself for a worker that does not


class _Request(NamedTuple):
    channel: Channel[ClientMessage]
    worker: str
    deadline: asyncio.TimerHandle


class StackRequests:
    """The requests, used on one event loop.

    ask(worker, number)  asks the agent of the worker, which answers with this number, and returns an empty text; or the
                         reason why that is impossible
    """

    def __init__(self, ask: Callable[[str, int], str], deadline_s: float = _AGENT_S) -> None:
        self._ask, self._deadline_s = ask, deadline_s
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}

    def begin(self, channel: Channel[ClientMessage], workers: Sequence[str]) -> None:
        """Ask for the stacks of these workers, for the command on this connection."""
        for worker in workers:
            number = next(self._numbers)
            if problem := self._ask(worker, number):
                channel.send(StacksOfWorker(worker, "", problem))
                continue
            deadline = asyncio.get_running_loop().call_later(self._deadline_s, self._give_up, number)
            self._requests[number] = _Request(channel, worker, deadline)

    def on_written(self, message: StacksWritten) -> None:
        """Hand on the answer of an agent. Those that nobody waits for any more are dropped."""
        request = self._requests.get(message.number)
        if request is not None and request.worker == message.worker:
            del self._requests[message.number]
            request.deadline.cancel()
            request.channel.send(StacksOfWorker(message.worker, message.text, message.problem))

    def forget(self, channel: Channel[ClientMessage]) -> None:
        """Drop the requests of a command that has closed its connection."""
        for number in [number for number, each in self._requests.items() if each.channel is channel]:
            self._requests.pop(number).deadline.cancel()

    def _give_up(self, number: int) -> None:
        request = self._requests.pop(number)
        problem = f"its agent has not answered within {self._deadline_s:g} s"
        request.channel.send(StacksOfWorker(request.worker, "", problem))
