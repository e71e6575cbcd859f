"""One side's heartbeats, and how far the other side has heard them. Used by coordinator and agents. Pure.

Each heartbeat says which heartbeat of the other side was the newest to arrive. So a side knows a time at which both
directions still worked: when it sent the newest of its heartbeats that came back acknowledged. A link that is broken
one way only ages on both sides alike, though one of them still hears the other.
"""

from __future__ import annotations

from collections import deque

LONGEST_HEARTBEAT_S = 0.5

_REMEMBERED = 1000
"""Heartbeats that nobody has heard yet. Of older ones it is of no use to know when they were sent: who hears anything
hears newer ones, too, and who hears nothing for so long, minutes, counts as silent since the last one that was
heard."""


def heartbeat_period_s(budget_s: float) -> float:
    """Seconds between two heartbeats where silence may last `budget_s`."""
    return min(budget_s / 10, LONGEST_HEARTBEAT_S)


class Heartbeats:
    """Heartbeats are counted from 1; what opened the connection counts as number 0.

    heard      the newest heartbeat of the other side
    reached_s  when the newest of ours was sent that the other side has heard
    """

    def __init__(self, now_s: float) -> None:
        self.sequence = 0
        self.heard = 0
        self.reached_s = now_s
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def next(self, now_s: float) -> int:
        """The number of the heartbeat that is sent now, together with `heard`."""
        self.sequence += 1
        self._sent.append((self.sequence, now_s))
        return self.sequence

    def hear(self, sequence: int, heard: int) -> bool:
        """Heartbeat `sequence` of the other side came, which has heard our heartbeat `heard`. Whether that tells
        anything new of both directions: the same heartbeat may come twice, on two ways."""
        self.heard = max(self.heard, sequence)
        before_s = self.reached_s
        while self._sent and self._sent[0][0] <= heard:
            self.reached_s = self._sent.popleft()[1]
        return self.reached_s > before_s
