"""Messages that have come and those that are waited for: who gets which. point_to_point.py delivers, and waits."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class P2PMessage(NamedTuple):
    """source   the global rank that sent it
    subject  what only sender and receiver have to agree on: a group, and a tag or the number of an operation
    content  its own memory
    """

    source: int
    subject: bytes
    content: bytearray


class Expected:
    """A message that somebody waits for: the first one of this subject from `source`, or from anybody.

    message  None until it has come"""

    def __init__(self, source: int | None, subject: bytes) -> None:
        self.source, self.subject = source, subject
        self.message: P2PMessage | None = None

    def matches(self, message: P2PMessage) -> bool:
        return self.subject == message.subject and self.source in (None, message.source)


class MessageQueue:
    """Of one rank. Messages of one source and subject are handed out in the order in which they came, to those who wait
    in the order in which they began to."""

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
