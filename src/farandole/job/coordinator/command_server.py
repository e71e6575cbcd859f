"""The coordinator's side of the connections of commands and of pages: requests, and the events of the job. reception.py
accepts them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from farandole.base.events.event import Event, Field
from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.channel import Channel
from farandole.base.wire.control import (
    STACKS_S,
    Accepted,
    AskDrain,
    AskScale,
    AskStacks,
    AskStatus,
    AskUndrain,
    ClientHello,
    ClientMessage,
    EventRecord,
    PastEvent,
    StacksOfWorker,
    Status,
    Subscribe,
)
from farandole.base.wire.messages import StacksWritten
from farandole.errors import ProtocolError
from farandole.job.coordinator.control_requests import JobSummary, judge, status_of, summary_of
from farandole.job.coordinator.decision_loop import DecisionLoop

EVENTS_SHOWN = 20
"""The number of events in a status."""

EVENTS_KEPT = 1000
"""The number of events that a new subscriber gets; of more the oldest are dropped."""

_LONGEST_TEXT = 8000  # of an event that is kept: there may be many, with tracebacks


class _KeptEvent(NamedTuple):
    number: int
    at_s: float
    level: str
    line: str
    fields: dict[str, Field]


class Clients:
    """Answers each request from the current job; one request after the other on each connection. Subscribers also get
    each event, once what was decided with it is in the journal.

    ask_for_stacks  as in StackRequests
    caught_up       waits until what was decided is in the journal

    Attributes:
        telemetry: The last measurements that each agent has sent, by worker.
        stacks: The requests for stacks that have not been answered.
    """

    def __init__(
        self,
        decisions: DecisionLoop,
        ask_for_stacks: Callable[[str, int], str],
        caught_up: Callable[[], Awaitable[None]],
    ) -> None:
        self.stacks = StackRequests(ask_for_stacks)
        self._decisions, self._caught_up = decisions, caught_up
        self.telemetry: dict[str, Mapping[str, WorkerTelemetry]] = {}
        self._events: deque[_KeptEvent] = deque(maxlen=EVENTS_KEPT)
        self._count = 0
        self._subscribers: dict[Channel[ClientMessage], int] = {}  # with the number of the newest event that was sent
        self._is_publishing = False

    def remember(self, event: Event) -> None:
        """Keep the event, for later answers and for the subscribers."""
        self._count += 1
        fields = {name: _short(value) for name, value in event.fields().items()}
        line = str(_short(event.line()))
        self._events.append(_KeptEvent(self._count, self._decisions.clock.now_s(), event.level, line, fields))
        if self._subscribers and not self._is_publishing:
            self._is_publishing = True
            # After the decision that the event belongs to: it may not be in the journal yet.
            asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._is_publishing = False
        for channel, sent in self._subscribers.items():
            self._send_events(channel, sent)

    def _send_events(self, channel: Channel[ClientMessage], sent: int) -> None:
        """Send the kept events after number `sent`."""
        now_s, epoch = self._decisions.clock.now_s(), self._decisions.job.coordinator_epoch
        new = list(itertools.takewhile(lambda event: event.number > sent, reversed(self._events)))
        for number, at_s, level, line, fields in reversed(new):
            channel.send(EventRecord(epoch, number, max(0.0, now_s - at_s), level, line, fields))
        self._subscribers[channel] = self._count

    def status(self) -> Status:
        now_s = self._decisions.clock.now_s()
        shown = list(itertools.islice(reversed(self._events), EVENTS_SHOWN))
        events = tuple(PastEvent(max(0.0, now_s - event.at_s), event.line) for event in reversed(shown))
        status = status_of(self._decisions.job, now_s, self._decisions.steps(), self._measured())
        return msgspec.structs.replace(status, events=events, coordinator_pid=os.getpid())

    def summary(self) -> JobSummary:
        return summary_of(self._decisions.job, self._decisions.steps(), self._measured())

    def _measured(self) -> dict[str, WorkerTelemetry]:
        return {name: each for workers in self.telemetry.values() for name, each in workers.items()}

    async def serve(self, channel: Channel[ClientMessage]) -> None:
        """Serve the command until it closes the connection, which raises ConnectionError. Raises ProtocolError when the
        command violates the protocol."""
        try:
            while True:
                await self._answer(channel, await channel.receive())
        finally:
            self._subscribers.pop(channel, None)
            self.stacks.forget(channel)

    async def _answer(self, channel: Channel[ClientMessage], asked: ClientMessage) -> None:
        match asked:
            case AskStatus():
                channel.send(self.status())
            case AskScale() | AskDrain() | AskUndrain():
                answer = judge(self._decisions.job, asked)
                if isinstance(answer, Accepted):
                    self._decisions.decide(asked)
                    await self._caught_up()
                channel.send(answer)
            case AskStacks(workers):
                self.stacks.begin(channel, workers)
            case Subscribe(epoch, after):
                self._send_events(channel, after if epoch == self._decisions.job.coordinator_epoch else 0)
            case ClientHello():
                raise ProtocolError("the command sent ClientHello twice")


def _short(value: Field) -> Field:
    """Return a value of an event without the middle of a text that is too long."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[: _LONGEST_TEXT // 2]}\n...\n{value[-_LONGEST_TEXT // 2 :]}"
    return value


# Requests for the stacks of workers: each gets an answer for each worker, at a deadline at the latest -----------------

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
