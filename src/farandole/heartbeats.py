"""Count the heartbeats of one side, and their acknowledgements by the other. Coordinator and agents use it. Pure.

Each heartbeat acknowledges the newest one received from the other side. So a side knows a time at which both directions
still worked: when it sent the newest of its heartbeats that was acknowledged. When a link is broken in one direction,
the time without contact grows on both sides alike, though one of them still receives.
"""

from __future__ import annotations

from collections import deque

LONGEST_HEARTBEAT_S = 0.5

_REMEMBERED = 1000
"""The number of unacknowledged heartbeats whose time is kept. Older times are useless: a side that receives any
heartbeat also receives newer ones, and a side without contact for minutes counts as silent since its last
acknowledgement."""


def heartbeat_period_s(budget_s: float) -> float:
    """Return the seconds between two heartbeats where silence may last `budget_s`."""
    return min(budget_s / 10, LONGEST_HEARTBEAT_S)


class Heartbeats:
    """The heartbeats of one side, counted from 1; the message that opened the connection counts as number 0.

    Attributes:
        heard: The newest heartbeat of the other side.
        reached_s: The time at which the newest of this side's acknowledged heartbeats was sent.
    """

    def __init__(self, now_s: float) -> None:
        self.sequence = 0
        self.heard = 0
        self.reached_s = now_s
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def next(self, now_s: float) -> int:
        """Return the number of the heartbeat that is sent now, together with `heard`."""
        self.sequence += 1
        self._sent.append((self.sequence, now_s))
        return self.sequence

    def hear(self, sequence: int, heard: int) -> bool:
        """Record heartbeat `sequence` of the other side, which acknowledges this side's `heard`.

        Returns whether that is news of both directions: the same heartbeat may come twice, on two paths.
        """
        self.heard = max(self.heard, sequence)
        before_s = self.reached_s
        while self._sent and self._sent[0][0] <= heard:
            self.reached_s = self._sent.popleft()[1]
        return self.reached_s > before_s
