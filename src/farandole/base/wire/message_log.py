"""The messages between an agent and the coordinator that must not be lost with a connection. Pure.

Each side counts these messages, in both directions, over all connections of a session. It keeps those that it has sent
until the other side has confirmed them, and sends the rest again on the next connection. So each of them is handled
exactly once and in its order, also by a coordinator that was started again: its journal (coordinator/journal.py) holds
its log, and it confirms only what the journal holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from farandole.base.wire.function_call import PartReceived, ReturnPart
from farandole.base.wire.message import Message
from farandole.base.wire.messages import (
    AgentLeaving,
    Dismissed,
    ForwardToWorkers,
    FromWorker,
    JobOver,
    Kill,
    Spawn,
    SpawnFailed,
    StartWorkers,
    WorkerDying,
    WorkerExited,
    WorkerMet,
)
from farandole.errors import ProtocolError

_COUNTED = (
    *(FromWorker, WorkerDying, WorkerExited, SpawnFailed, WorkerMet, AgentLeaving, ReturnPart),
    *(Spawn, Kill, ForwardToWorkers, StartWorkers, PartReceived, Dismissed, JobOver),
)


def is_counted(message: Message) -> bool:
    """Return whether the message must arrive also when the connection ends before it has: not a report that a later
    one replaces, such as a heartbeat or a status."""
    return isinstance(message, _COUNTED)


T = TypeVar("T")


class MessageLog(Generic[T]):
    """One side's log of a session.

    Attributes:
        handled: The number of the other side's messages that this side has handled.
    """

    def __init__(self, handled: int = 0, confirmed: int = 0, kept: Iterable[T] = ()) -> None:
        self.handled = handled
        self._confirmed = confirmed
        self._kept: deque[T] = deque(kept)

    @property
    def confirmed(self) -> int:
        """The number of this side's messages that the other side has handled, as far as it has said so."""
        return self._confirmed

    @property
    def kept(self) -> tuple[T, ...]:
        """The messages after these."""
        return tuple(self._kept)

    @property
    def sent(self) -> int:
        """The number of messages that this side has sent."""
        return self._confirmed + len(self._kept)

    def keep(self, message: T) -> None:
        """Keep a message that is sent now, until it is confirmed."""
        self._kept.append(message)

    def confirm(self, count: int) -> None:
        """Forget the first `count` messages of the session: the other side has handled them. Raises ProtocolError when
        they are more than were sent."""
        if count > self.sent:
            raise ProtocolError(f"{count} messages were confirmed, {self.sent} were sent")
        while self._confirmed < count:
            self._kept.popleft()
            self._confirmed += 1

    def after(self, count: int) -> Sequence[T]:
        """Return the messages after the first `count`, which the other side has handled. Raises ProtocolError when some
        of them are not kept any more, or when `count` is too large."""
        if not self._confirmed <= count <= self.sent:
            raise ProtocolError(f"messages after {count} were requested, {self._confirmed} to {self.sent} are kept")
        return tuple(islice(self._kept, count - self._confirmed, None))
