"""Asynchronous tests: every one has a deadline, and waits for events instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from farandole.base.events.event import Event

DEADLINE_S = 20.0

T = TypeVar("T")
EventT = TypeVar("EventT", bound=Event)


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous test to its end, which comes within the deadline."""
    return asyncio.run(asyncio.wait_for(test, DEADLINE_S))


class EventLog:
    """Keeps the events it is called with, and lets a test wait for one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._waiting: list[tuple[Callable[[Event], bool], asyncio.Future[Any]]] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        for is_wanted, future in self._waiting:
            if is_wanted(event) and not future.done():
                future.set_result(event)

    def of(self, kind: type[EventT]) -> list[EventT]:
        """The events of this kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def next(self, kind: type[EventT]) -> EventT:
        """The next event of this kind; those before the call do not count."""
        future: asyncio.Future[EventT] = asyncio.get_running_loop().create_future()
        self._waiting.append((lambda event: isinstance(event, kind), future))
        return await asyncio.wait_for(future, DEADLINE_S)
