"""The link between the launcher and the coordinator's process, and the frames that they send to each other.

The link is a socket pair that nobody else can reach, so that its frames may be pickled. What must not be lost with the
coordinator is counted, in both directions, as in the sessions of agents (wire/message_log.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from dataclasses import dataclass
from typing import Any

import msgspec

from farandole.base.events.kinds import KINDS
from farandole.base.membership import Address
from farandole.base.wire.frames import LENGTH
from farandole.base.wire.message_log import MessageLog
from farandole.base.wire.messages import OutputMessage
from farandole.job.coordinator.journal import JournalError
from farandole.job.coordinator.transition import Outcome

ALIVE_EVERY_S = 0.1

SUMMARY_EVERY_S = 1.0
"""Seconds between two JobSummary; the measurements in them are as old."""


# Frames to the coordinator: first its CoordinatorSetup; then a Call, which is counted, or one of the others.


@dataclass(frozen=True)
class Call:
    """Call a method of the coordinator. In the other direction, where it is not counted: of the store."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Listen:
    """Listen on further addresses. Answer: Listening."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StoreOpened:
    """Answer to OpenStore. `problem` is the reason why it could not be opened; empty: it was."""

    port: int
    problem: str = ""


@dataclass(frozen=True)
class Copied:
    """Answer to Copy: what was decided may be told."""


@dataclass(frozen=True)
class FramesHandled:
    """The sender has handled so many of the counted frames. From both sides."""

    count: int


# Frames to the launcher: events, and Over, are counted; the others, and JobSummary, are not.


@dataclass(frozen=True)
class Over:
    """The job has ended; its agents are being told."""


@dataclass(frozen=True)
class Alive:
    """The event loop of the coordinator runs. Sent every ALIVE_EVERY_S seconds; not counted."""


@dataclass(frozen=True)
class Ended:
    """The last frame. `error` is an internal error that has ended the job, in words."""

    outcome: Outcome | None
    error: str = ""


@dataclass(frozen=True)
class Listening:
    """The coordinator listens at these addresses, and has handled so many counted frames; or it cannot listen.

    problem  why it cannot, in words; empty: it does
    errno    of the system, where that is the reason; else 0
    """

    addresses: tuple[Address, ...]
    handled: int
    problem: str = ""
    errno: int = 0


@dataclass(frozen=True)
class Output:
    """A message about the output of an agent's workers, as for `on_output` of Coordinator."""

    agent: str
    message: OutputMessage | None


@dataclass(frozen=True)
class OpenStore:
    """Open the job's store at these addresses, too. Answer: StoreOpened."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """Write a copy of the newest state in the journal. Answer: Copied; until then the journal does not change."""


class KeptFrames(msgspec.Struct, frozen=True):
    """The log of a coordinator's counted frames, with its launcher, as its journal has it: each frame by the name of
    its class. Only the coordinators of the same launcher, so of the same release, read the frames."""

    launcher: str
    handled: int = 0
    confirmed: int = 0
    kept: tuple[tuple[str, msgspec.Raw], ...] = ()

    @classmethod
    def of(cls, launcher: str, log: MessageLog[object]) -> KeptFrames:
        kept = ((type(each).__name__, msgspec.Raw(msgspec.msgpack.encode(each))) for each in log.kept)
        return cls(launcher, log.handled, log.confirmed, tuple(kept))

    def log(self) -> MessageLog[object]:
        """Return the log. Raises JournalError when it cannot be decoded."""
        try:
            kept = [
                msgspec.msgpack.decode(data, type=Over if name == Over.__name__ else KINDS[name])
                for name, data in self.kept
            ]
        except (AttributeError, msgspec.MsgspecError) as error:
            raise JournalError(f"the coordinator's journal cannot be read ({error})") from None
        return MessageLog(self.handled, self.confirmed, kept)


class Link:
    """One end of the link, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, connected: socket.socket) -> Link:
        return cls(*await asyncio.open_unix_connection(sock=connected))

    def send(self, frame: object) -> None:
        """Send an object of one of the classes above, or an event. A link that is closed drops it."""
        if not self._writer.is_closing():
            data = pickle.dumps(frame)
            self._writer.write(LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        """Return the next object. Raises ConnectionError when the other process has ended."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise ConnectionError("the other process has ended") from None

    async def drain(self) -> None:
        """Wait until the kernel has most of what was sent."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the other process has read everything and closed the link; what it sends is dropped. To close this
        end while there is something unread would be an error at the other one, which may hide the last frame."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self._reader.read(1 << 16):
                    pass

    def close(self) -> None:
        """Close it. Idempotent."""
        self._writer.close()
