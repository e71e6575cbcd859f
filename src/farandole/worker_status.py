"""The status of a worker, as far as others can see it. Pure.

Workers report it (liveness/status_reporting.py), agents read it (liveness/status_page.py) and forward it, the
coordinator evaluates it (coordinator/hang_detection.py).
"""

from __future__ import annotations

import enum

import msgspec

LONGEST_BETWEEN_S = 2.0
"""The longest interval, in seconds, between two reports of an agent, also when nothing has changed."""


class Phase(enum.IntEnum):
    """The phase of the main thread of a worker."""

    OUTSIDE = 0  # before the elastic function, or after it
    USER = 1  # the script's own code
    WAITING = 2  # for other workers, in a collective
    REGROUPING = 3  # between two generations
    FINISHED = 4  # at the end of the elastic function, waiting for the others


class WorkerStatus(msgspec.Struct, frozen=True):
    """The status of a worker at one moment. An equal `count` means that nothing has changed.

    `step` counts decided steps, or commits where steps are not counted.
    """

    count: int
    generation: int
    step: int
    phase: Phase
