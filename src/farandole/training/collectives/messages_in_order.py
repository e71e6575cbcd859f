"""Messages between two ranks, and the calls that wait for them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class P2PMessage(NamedTuple):
    """A message between two ranks.

    Attributes:
        source: The global rank that sent it.
        subject: Agreed on by sender and receiver only: a group, and a tag or the number of an operation.
        content: Memory of its own.
    """

    source: int
    subject: bytes
    content: bytearray


class Expected:
    """A message that a call waits for: the first one of this subject from `source`, or from any rank.

    `message` is None until it has come.
    """

    def __init__(self, source: int | None, subject: bytes) -> None:
        self.source, self.subject = source, subject
        self.message: P2PMessage | None = None

    def matches(self, message: P2PMessage) -> bool:
        return self.subject == message.subject and self.source in (None, message.source)


class MessageQueue:
    """The messages of one rank.

    Messages of one source and subject are returned in the order of their arrival, to calls in the order in which they
    began to wait.
    """

    def __init__(self) -> None:
        self._unclaimed: deque[P2PMessage] = deque()
        self._expected: deque[Expected] = deque()

    def deliver(self, message: P2PMessage) -> None:
        for expected in self._expected:
            if expected.matches(message):
                expected.message = message
                self._expected.remove(expected)
                return
        self._unclaimed.append(message)

    def expect(self, source: int | None, subject: bytes) -> Expected:
        expected = Expected(source, subject)
        for message in self._unclaimed:
            if expected.matches(message):
                expected.message = message
                self._unclaimed.remove(message)
                return expected
        self._expected.append(expected)
        return expected
