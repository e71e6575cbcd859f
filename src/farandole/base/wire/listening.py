"""Listening for connections from anybody: limits on those that have not proved who they are. The coordinator, its store
and the agents use it, on one event loop each.

A stranger can open connections as fast as the kernel permits. So at most STRANGERS_LIMIT are listened to, and the
oldest makes room for the next one: a real peer proves itself within milliseconds. Connections that fail cost a budget;
when it is used up, further ones wait in the kernel's queue, and the process stays free for its work. What is reported
about them is limited as well.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from farandole.base.events.job_events import ConnectionRefused
from farandole.base.machine import now_s
from farandole.base.membership import Address

STRANGERS_LIMIT = 512
"""Connections of one listener that may be unproved at the same time."""

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""

_FAILURES_PER_S, _FAILURES_AT_ONCE = 750.0, 500.0
_OUT_OF_DESCRIPTORS_S = 0.1  # before the next attempt to accept
_TURNS = 16  # connections that are accepted before others have their turn

T = TypeVar("T")


class FailureBudget:
    """Counts connections that failed, and tells how long no further one should be accepted."""

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self._clock = clock
        self._left, self._at_s = _FAILURES_AT_ONCE, clock()

    def count(self) -> None:
        """Count a connection that has ended without a proof."""
        self._refill()
        self._left -= 1

    def pause_s(self) -> float:
        """Return the seconds to wait before the next connection is accepted."""
        self._refill()
        return max(0.0, -self._left / _FAILURES_PER_S)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(_FAILURES_AT_ONCE, self._left + (now - self._at_s) * _FAILURES_PER_S)
        self._at_s = now


class Strangers(Generic[T]):
    """The connections of one listener that have not proved themselves, the oldest first, `most` of them. `drop` is
    called with one that has to make room, and is forgotten; `budget` counts those that fail."""

    def __init__(self, drop: Callable[[T], None], budget: FailureBudget, most: int = STRANGERS_LIMIT) -> None:
        self._drop, self._budget, self._most = drop, budget, most
        self._all: dict[T, None] = {}

    def __contains__(self, stranger: T) -> bool:
        return stranger in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._all))

    def add(self, stranger: T) -> None:
        """Add a new connection."""
        self._all[stranger] = None
        if len(self._all) > self._most:
            oldest = next(iter(self._all))
            self.failed(oldest)
            self._drop(oldest)

    def proved(self, stranger: T) -> None:
        """Forget a connection that has proved itself. Idempotent."""
        self._all.pop(stranger, None)

    def failed(self, stranger: T) -> None:
        """Forget a connection that has ended, and count it unless it had proved itself. Idempotent."""
        if stranger in self._all:
            del self._all[stranger]
            self._budget.count()


class Listener:
    """Accepts connections at any number of sockets, as fast as `budget` permits. `on_connection` is called with each
    new one, which is non-blocking, and the address of its other end, which is empty for a unix socket."""

    def __init__(self, on_connection: Callable[[socket.socket, str], None], budget: FailureBudget) -> None:
        self._on_connection, self._budget = on_connection, budget
        self._sockets: list[socket.socket] = []
        self.addresses: tuple[Address, ...] = ()
        """The TCP addresses at which it listens, or did before close()."""
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, sockets: Sequence[socket.socket]) -> None:
        """Listen at further sockets, which are bound."""
        for each in sockets:
            each.setblocking(False)
            each.listen(BACKLOG)
            self._sockets.append(each)
            if each.family != socket.AF_UNIX:
                self.addresses += (Address(*each.getsockname()[:2]),)
            self._tasks.append(asyncio.get_running_loop().create_task(self._accept(each)))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        self._sockets.clear()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            try:
                connected, address = await loop.sock_accept(listening)
            except OSError:  # it was aborted already, or there are no descriptors left
                await asyncio.sleep(_OUT_OF_DESCRIPTORS_S)
                continue
            try:
                self._on_connection(connected, "{}:{}".format(*address[:2]) if address else "")
            except Exception as error:  # noqa: BLE001 - one connection must not end the listening
                connected.close()
                loop.call_exception_handler({"message": "a connection was not served", "exception": error})
            accepted += 1
            if (pause_s := self._budget.pause_s()) or accepted % _TURNS == 0:
                await asyncio.sleep(pause_s)


# What is reported about refused connections --------------------------------------------------------------------------

_REPORTS = 10
REPORTS_EVERY_S = 10.0
"""Seconds in which so many are reported one by one."""


class RefusalReports:
    """Passes on refused connections, but not more than some at a time: a stranger must not fill the log either."""

    def __init__(self, on_event: Callable[[ConnectionRefused], None], clock: Callable[[], float] = now_s) -> None:
        self._on_event, self._clock = on_event, clock
        self._since_s, self._count, self._unreported = clock(), 0, 0
        self._last = ""

    def __call__(self, refused: ConnectionRefused) -> None:
        """Report a refused connection now, or count it for flush()."""
        self.flush()
        self._count += 1
        if self._count <= _REPORTS:
            self._on_event(refused)
        else:
            self._unreported, self._last = self._unreported + 1, f"{refused.who}: {refused.reason}"

    def flush(self) -> None:
        """Report the connections that were only counted, if it is time. Call this now and then."""
        if self._clock() - self._since_s >= REPORTS_EVERY_S:
            self.finish()

    def finish(self) -> None:
        """Report the connections that were only counted, at the end or when the time is over."""
        unreported, self._unreported = self._unreported, 0
        self._since_s, self._count = self._clock(), 0
        if unreported:
            self._on_event(ConnectionRefused(f"{unreported} others", f"the last one was {self._last}"))
