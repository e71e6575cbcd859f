"""Answers the commands of people: status, scale, drain. server.py hands it their connections."""

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
    """Answers from what is known now; one request after the other on each connection.

    job     the job as it is now            decide  has something decided
    now_s   the job's clock                 steps   by worker, those that it was seen to have decided
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
        """It is among the events of the status from now on."""
        self._events.append((self._now_s(), event.line()))

    def status(self) -> Status:
        """The job now."""
        now_s = self._now_s()
        events = tuple(PastEvent(max(0.0, now_s - at_s), line) for at_s, line in self._events)
        return msgspec.structs.replace(describe(self._job(), now_s, self._steps()), events=events)

    async def serve(self, channel: Channel[ClientMessage], hello: ClientHello) -> None:
        """Until the command hangs up, which is a ConnectionError. Raises ProtocolError when it does not speak as it
        should."""
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
