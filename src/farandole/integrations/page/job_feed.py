"""The page's connection to the coordinator: it fills a JobHistory, and connects again when the coordinator has died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from farandole.base.machine import now_s, wall_time_s
from farandole.base.wire.channel import Channel
from farandole.base.wire.control import AskStatus, EventRecord, Status, Subscribe, ToClient
from farandole.errors import AuthenticationError, ProtocolError
from farandole.job.launch.job_history import JobHistory

STATUS_EVERY_S = 1.0

_AFTER_EVENT_S = 0.1  # after an event the next status comes early, but not more often than that
_AGAIN_S = 0.1
_AGAIN_LATER_S = 1.0
_SOON_S = 10.0  # for which a coordinator that has died is expected back; later one looks for it less often


class JobFeed:
    """The connection: `await run()`, which returns when the job has ended.

    Args:
        history: The history to fill.
        dial: Connects to the coordinator, as a command does. It may raise OSError, or that the token is refused.
        publish: Called with what pages have to be told: a kind of message, and its data.
        is_over: Returns whether no other coordinator can follow; it cannot be known of a job on another machine.
    """

    def __init__(
        self,
        history: JobHistory,
        dial: Callable[[], Awaitable[Channel[ToClient]]],
        publish: Callable[[str, dict[str, Any]], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._history, self._dial, self._publish, self._is_over = history, dial, publish, is_over
        self._has_ended = False
        self._wants_status = asyncio.Event()
        self._lost_s = now_s()

    async def run(self) -> None:
        """Serve until the job has ended. Raises AuthenticationError and ProtocolError: the token is not the job's, or
        the job runs with another version of Farandole."""
        while not self._has_ended and not self._is_over():
            try:
                channel = await self._dial()
            except OSError:
                await self._wait()
                continue
            try:
                await self._follow(channel)
            except ConnectionError:
                self._lost_s = now_s()
            except (AuthenticationError, ProtocolError):
                if self._history.status is None:
                    raise
                self._lost_s = now_s()
            finally:
                channel.abort()
            if not self._has_ended:
                self._tell_contact("lost")
        self._tell_contact("ended")

    async def _wait(self) -> None:
        is_soon = now_s() < self._lost_s + _SOON_S
        await asyncio.sleep(_AGAIN_S if is_soon else _AGAIN_LATER_S)

    async def _follow(self, channel: Channel[ToClient]) -> None:
        epoch, number = self._history.newest
        channel.send(Subscribe(epoch, number))
        channel.send(AskStatus())
        asking = asyncio.create_task(self._ask(channel))
        try:
            while True:
                self._handle(await channel.receive())
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    async def _ask(self, channel: Channel[ToClient]) -> None:
        """Ask for the status about once a second, and soon after an event."""
        while True:
            self._wants_status.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_EVERY_S):
                    await self._wants_status.wait()
                    await asyncio.sleep(_AFTER_EVENT_S)
            channel.send(AskStatus())

    def _handle(self, message: ToClient) -> None:
        if isinstance(message, EventRecord):
            self._publish("event", self._history.on_event(message, wall_time_s() - message.ago_s))
            self._has_ended |= message.fields.get("event") == "JobEnds"
            self._wants_status.set()
        elif isinstance(message, Status):
            self._tell_contact("connected")
            self._publish("status", self._history.on_status(message, wall_time_s()))

    def _tell_contact(self, contact: str) -> None:
        if self._history.contact != contact:
            self._publish("contact", self._history.on_contact(contact))
