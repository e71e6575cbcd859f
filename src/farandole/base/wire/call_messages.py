"""Messages that carry a call of farandole.run() to the agents of other machines, and its results back."""

from __future__ import annotations

from farandole.base.wire.message import Message


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
