"""Where a worker is, as far as others can see. Pure. Workers say it (status_reporting.py), agents read it
(status_page.py) and pass it on, the coordinator draws conclusions (coordinator/hang_detection.py)."""

from __future__ import annotations

import enum

import msgspec

LONGEST_BETWEEN_S = 2.0
"""An agent says what it sees at least so often, also when nothing has changed."""


class Phase(enum.IntEnum):
    """What the main thread of a worker is in."""

    OUTSIDE = 0  # before the elastic function, or after it
    USER = 1  # the script's own code
    WAITING = 2  # for other workers, in a collective
    REGROUPING = 3  # between two generations
    FINISHED = 4  # at the end of the elastic function, where the others are awaited


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker at one moment. The same `count` means: nothing has changed, nothing has moved. `step`: decided ones, or
    commits where steps are not counted."""

    count: int
    generation: int
    step: int
    phase: Phase
