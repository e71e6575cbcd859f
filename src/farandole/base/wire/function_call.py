"""The call of farandole.run() and the returns of its workers: their files in the scratch folder of an agent, and their
way over the connection between the agent and the coordinator, with its messages.

The launcher pickles the call. The coordinator sends it to each agent before Welcome, and the agent writes it into its
scratch folder, where each worker (worker/function_task.py) reads it. A worker leaves its result, or its traceback, in
the same folder; its agent sends this file before it reports the worker's exit. Only workers unpickle the call, and only
the launcher unpickles results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from farandole.base.wire.message import Message
from farandole.errors import ProtocolError

LARGEST_BYTES = 1 << 30
"""The largest call, and the largest result of one worker, in bytes: agents hold the call in memory."""

PART_BYTES = 1 << 18
"""The largest part of a return. One is on its way at a time, and delays the agent's heartbeats only that much."""

_CALL_PART_BYTES = 1 << 20


class Call(msgspec.Struct, frozen=True):
    """The call as it travels: the function, written by cloudpickle, and the sys.path on which its modules are found."""

    search_path: tuple[str, ...]
    pickled: bytes


class Return(msgspec.Struct, frozen=True):
    """The return of a worker: its pickled result, or, with `is_error`, the text of its traceback in UTF-8. `rank` is
    the worker's rank in the last generation, and `size` the number of workers in it."""

    rank: int
    is_error: bool
    data: bytes
    size: int = 1


class CallComes(Message, frozen=True):
    """Before Welcome: the call of farandole.run() follows, `size` bytes in several CallPart. Answer: CallReceived."""

    size: int


class CallPart(Message, frozen=True):
    """The next part of the call."""

    data: bytes


class CallReceived(Message, frozen=True):
    """Answer to CallComes: all parts of the call have arrived."""


class ReturnPart(Message, frozen=True):
    """A part of the file in which a worker of farandole.run() has left its result or its traceback; before its
    WorkerExited. Answer: PartReceived, for which the agent waits before it sends the next part.

    Attributes:
        data: At most PART_BYTES of wire/function_call.py.
        age_s: The time since the worker wrote the file.
    """

    worker: str
    data: bytes
    is_last: bool
    age_s: float


class PartReceived(Message, frozen=True):
    """Answer to a ReturnPart of this worker."""

    worker: str


def call_file(scratch: Path) -> Path:
    """Return the path of the call."""
    return scratch / "call"


def return_file(scratch: Path, worker: str) -> Path:
    """Return the path of a worker's return."""
    return scratch / f"return.{worker}"


@dataclass(frozen=True)
class FunctionJob:
    """The part of a job of farandole.run() that other jobs do not have.

    call       an encoded Call
    on_return  called with each part of each return
    """

    call: bytes
    on_return: Callable[[ReturnPart], None]


class CallChannel(Protocol):
    """The part of a Channel that is needed here."""

    def send(self, message: Message) -> None: ...

    async def drain(self) -> None: ...

    async def receive(self) -> Any: ...


async def send_call(channel: CallChannel, call: bytes) -> None:
    """Send the call to an agent, and wait until the agent has received it. `channel` receives CallReceived. Raises what
    its methods raise."""
    channel.send(CallComes(len(call)))
    for start in range(0, len(call), _CALL_PART_BYTES):
        channel.send(CallPart(call[start : start + _CALL_PART_BYTES]))
        await channel.drain()
    await channel.receive()


async def receive_call(channel: CallChannel, size: int) -> bytes:
    """Return the call, of which CallComes has announced the size. Raises ProtocolError when something else arrives, and
    what the methods of `channel` raise."""
    if size > LARGEST_BYTES:
        raise ProtocolError(f"a call of {size} bytes was announced, at most {LARGEST_BYTES} are allowed")
    call = bytearray()
    while len(call) < size:
        part = await channel.receive()
        if not isinstance(part, CallPart) or not part.data:
            raise ProtocolError(f"{type(part).__name__} arrived after {len(call)} of the {size} bytes of the call")
        call += part.data
    channel.send(CallReceived())
    return bytes(call)
