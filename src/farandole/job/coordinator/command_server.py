"""The coordinator's side of the connections of commands and of pages: requests, and the events of the job. reception.py
accepts them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec

from farandole.base.events.event import Event, Field
from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.channel import Channel
from farandole.base.wire.control import (
    AskDrain,
    AskScale,
    AskStacks,
    AskStatus,
    AskUndrain,
    ClientHello,
    ClientMessage,
    EventRecord,
    PastEvent,
    Status,
    Subscribe,
)
from farandole.errors import ProtocolError
from farandole.job.coordinator.control_requests import JobSummary, judge, status_of, summary_of
from farandole.job.coordinator.inputs import Input
from farandole.job.coordinator.job import Job
from farandole.job.coordinator.stack_requests import StackRequests

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

    job     returns the current job         decide  applies an input to the job
    now_s   the job's clock                 steps   by worker, the last seen number of decided steps
    ask_for_stacks  as in StackRequests     caught_up  waits until what was decided is in the journal

    Attributes:
        telemetry: The last measurements that each agent has sent, by worker.
        stacks: The requests for stacks that have not been answered.
    """

    def __init__(
        self,
        job: Callable[[], Job],
        decide: Callable[[Input], None],
        now_s: Callable[[], float],
        steps: Callable[[], Mapping[str, int]],
        ask_for_stacks: Callable[[str, int], str],
        caught_up: Callable[[], Awaitable[None]],
    ) -> None:
        self.stacks = StackRequests(ask_for_stacks)
        self._job, self._decide, self._now_s, self._steps = job, decide, now_s, steps
        self._caught_up = caught_up
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
        self._events.append(_KeptEvent(self._count, self._now_s(), event.level, line, fields))
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
        now_s, epoch = self._now_s(), self._job().coordinator_epoch
        new = list(itertools.takewhile(lambda event: event.number > sent, reversed(self._events)))
        for number, at_s, level, line, fields in reversed(new):
            channel.send(EventRecord(epoch, number, max(0.0, now_s - at_s), level, line, fields))
        self._subscribers[channel] = self._count

    def status(self) -> Status:
        """Return the status of the job now."""
        now_s = self._now_s()
        shown = list(itertools.islice(reversed(self._events), EVENTS_SHOWN))
        events = tuple(PastEvent(max(0.0, now_s - event.at_s), event.line) for event in reversed(shown))
        status = status_of(self._job(), now_s, self._steps(), self._measured())
        return msgspec.structs.replace(status, events=events, coordinator_pid=os.getpid())

    def summary(self) -> JobSummary:
        """Return the summary of the job now."""
        return summary_of(self._job(), self._steps(), self._measured())

    def _measured(self) -> dict[str, WorkerTelemetry]:
        """Return the last measurements by worker."""
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
                answer, happened = judge(self._job(), asked)
                if happened is not None:
                    self._decide(happened)
                    await self._caught_up()
                channel.send(answer)
            case AskStacks(workers):
                self.stacks.begin(channel, workers)
            case Subscribe(epoch, after):
                self._send_events(channel, after if epoch == self._job().coordinator_epoch else 0)
            case ClientHello():
                raise ProtocolError("the command sent ClientHello twice")


def _short(value: Field) -> Field:
    """Return a value of an event without the middle of a text that is too long."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[: _LONGEST_TEXT // 2]}\n...\n{value[-_LONGEST_TEXT // 2 :]}"
    return value
