"""Messages that have come and those that are waited for: who gets which. mail.py delivers, and waits."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Letter(NamedTuple):
    """source   the global rank that sent it
    subject  what only sender and receiver have to agree on: a group, and a tag or the number of an operation
    content  its own memory
    """

    source: int
    subject: bytes
    content: bytearray


class Expected:
    """A letter that somebody waits for: the first one of this subject from `source`, or from anybody.

    letter  None until it has come"""

    def __init__(self, source: int | None, subject: bytes) -> None:
        self.source, self.subject = source, subject
        self.letter: Letter | None = None

    def matches(self, letter: Letter) -> bool:
        return self.subject == letter.subject and self.source in (None, letter.source)


class Letters:
    """Of one rank. Letters of one source and subject are handed out in the order in which they came, to those who wait
    in the order in which they began to."""

    def __init__(self) -> None:
        self._unclaimed: deque[Letter] = deque()
        self._expected: deque[Expected] = deque()

    def deliver(self, letter: Letter) -> None:
        for expected in self._expected:
            if expected.matches(letter):
                expected.letter = letter
                self._expected.remove(expected)
                return
        self._unclaimed.append(letter)

    def expect(self, source: int | None, subject: bytes) -> Expected:
        expected = Expected(source, subject)
        for letter in self._unclaimed:
            if expected.matches(letter):
                expected.letter = letter
                self._unclaimed.remove(letter)
                return expected
        self._expected.append(expected)
        return expected
