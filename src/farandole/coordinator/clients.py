"""Answers to the user's commands: status, scale, drain. server.py passes their connections to this module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from farandole.channel import Channel
from farandole.control import AskDrain, AskScale, AskStatus, AskUndrain, ClientHello, ClientMessage, PastEvent, Status
from farandole.coordinator.control_requests import judge
from farandole.coordinator.inputs import Input
from farandole.coordinator.job import Job
from farandole.coordinator.status import describe
from farandole.errors import ProtocolError
from farandole.events import Event
from farandole.messages import PROTOCOL_VERSION

EVENTS_KEPT = 20


class Clients:
    """Answers each request from the current job; one request after the other on each connection.

    job     returns the current job         decide  applies an input to the job
    now_s   the job's clock                 steps   by worker, the last seen number of decided steps
    """

    def __init__(
        self,
        job: Callable[[], Job],
        decide: Callable[[Input], None],
        now_s: Callable[[], float],
        steps: Callable[[], Mapping[str, int]],
    ) -> None:
        self._job, self._decide, self._now_s, self._steps = job, decide, now_s, steps
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)

    def remember(self, event: Event) -> None:
        """Keep the event for the list of events in later answers to the status command."""
        self._events.append((self._now_s(), event.line()))

    def status(self) -> Status:
        """Return the status of the job now."""
        now_s = self._now_s()
        events = tuple(PastEvent(max(0.0, now_s - at_s), line) for at_s, line in self._events)
        return msgspec.structs.replace(describe(self._job(), now_s, self._steps()), events=events)

    async def serve(self, channel: Channel[ClientMessage], hello: ClientHello) -> None:
        """Serve the command until it closes the connection, which raises ConnectionError. Raises ProtocolError when the
        command violates the protocol."""
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"a command of version {hello.version} dialed; this job has {PROTOCOL_VERSION}")
        while True:
            match await channel.receive():
                case AskStatus():
                    channel.send(self.status())
                case AskScale() | AskDrain() | AskUndrain() as asked:
                    answer, happened = judge(self._job(), asked)
                    if happened is not None:
                        self._decide(happened)
                    channel.send(answer)
                case ClientHello():
                    raise ProtocolError("a command said ClientHello twice")
