"""Tracebacks in the output of workers.

Tracebacks that several workers print are shown once; the others get one line that says so.

One bug in a training script makes every worker print it, mixed with the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

HOLD_S = 0.2
"""A traceback is held back for at most this long after its last line."""

_LONGEST_LINES = 400
_REMEMBERED = 64
_HEADER = b"Traceback (most recent call last):"
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_ADDRESS = re.compile(rb"\b0x[0-9a-f]{6,}\b")

# The kind of the line held last, and so of the lines that may follow.
_LineKind: TypeAlias = Literal["frames", "exception", "blank", "link", "blank after link"]


@dataclass
class _Block:
    """The lines of one worker's traceback so far. `complete` of them end with an exception's line."""

    deadline_s: float
    lines: list[bytes] = field(default_factory=lambda: [_HEADER])
    place: _LineKind = "frames"
    complete: int = 0
    summary: bytes = b""

    def take(self, line: bytes) -> bool:
        """Hold `line` if it continues the traceback, and return whether it does."""
        place = self._place_of(line)
        if place is None or len(self.lines) >= _LONGEST_LINES:
            return False
        self.lines.append(line)
        if place == "exception":
            self.complete = len(self.lines)
            if self.place == "frames":
                self.summary = line
        self.place = place
        return True

    def _place_of(self, line: bytes) -> _LineKind | None:
        if self.place == "frames" and line and line != _HEADER:
            return "frames" if line.startswith(b" ") else "exception"
        if self.place == "exception" and line.startswith(b" "):
            return "exception"  # a note, or a message of several lines
        if self.place == "exception" and not line:
            return "blank"
        if self.place == "blank" and line in _LINKS:
            return "link"
        if self.place == "link" and not line:
            return "blank after link"
        if self.place == "blank after link" and line == _HEADER:
            return "frames"
        return None


class TracebackFolder:
    """Takes the lines of all workers' stderr and returns those to show: all of them, in the order of each worker,
    except tracebacks that another worker has shown before."""

    def __init__(self) -> None:
        self._held: dict[str, _Block] = {}
        self._shown: dict[bytes, tuple[str, str]] = {}  # normalised text: worker and label that showed it

    def feed(self, worker: str, label: str, line: bytes, now_s: float) -> list[bytes]:
        """Return the lines of `worker` to show now. `label` is its current name for the user."""
        block = self._held.get(worker)
        if block is not None and block.take(line):
            block.deadline_s = now_s + HOLD_S
            return []
        lines = self.release(worker, label)
        if line == _HEADER:
            self._held[worker] = _Block(now_s + HOLD_S)
        else:
            lines.append(line)
        return lines

    def release(self, worker: str, label: str) -> list[bytes]:
        """Return the held lines of `worker` to show now: no more lines are awaited."""
        block = self._held.pop(worker, None)
        if block is None:
            return []
        if not block.complete:
            whole = self._whole_of(worker, block)
            return block.lines if whole is None else [b"the same traceback as %s, cut off" % whole.encode()]
        traceback, rest = block.lines[: block.complete], block.lines[block.complete :]
        text = _normal(traceback)
        shown_by, shown_as = self._shown.setdefault(text, (worker, label))
        if len(self._shown) > _REMEMBERED:
            del self._shown[next(iter(self._shown))]
        if shown_by == worker:
            return block.lines
        by = shown_as if shown_as != label else shown_by  # that was another worker's rank then
        return [b"the same traceback as %s: %s" % (by.encode(), block.summary), *rest]

    def _whole_of(self, worker: str, block: _Block) -> str | None:
        """Return the worker that has shown a longer traceback that begins with this one: the first worker's exit may
        end the others while they still print theirs."""
        begun = _normal(block.lines)
        for text, (shown_by, label) in self._shown.items():
            if shown_by != worker and len(text) > len(begun) and text.startswith(begun):
                return label
        return None

    def due(self, now_s: float) -> Iterator[str]:
        """Yield the workers whose held lines have waited long enough and are to be released."""
        return (worker for worker, block in list(self._held.items()) if block.deadline_s <= now_s)

    def next_deadline_s(self) -> float | None:
        """Return when the next worker will be due; None while no line is held."""
        return min((block.deadline_s for block in self._held.values()), default=None)


def _normal(lines: list[bytes]) -> bytes:
    """Return the text by which tracebacks are compared: without the parts that differ from process to process."""
    return _ADDRESS.sub(b"0x", b"\n".join(lines))
