"""Where a script under the step rule is between two calls of the run loop.

    ENTERING ── _enter ──► BEFORE, or JOINED on a newcomer
                             │
      ┌──── reach_boundary ──┘ ◄─────────────────────────────┐
      ▼                                                      │
    BODY ── leave_batches ──► BEHIND ── begin_epoch ──► BEFORE
    │ ▲ │                       │                         ▲
    └─┘ └─────── _regroup, begin_epoch ───────────────────┤
    reach_boundary              └──────── _regroup ───────┘

    BEFORE or JOINED ─ _regroup, begin_epoch ─► the same    no batch has come meanwhile
    BEFORE or JOINED ─ leave_batches ─► BEHIND              the epoch was left by `break`, and its rest comes to nothing
    BEHIND ─ reach_boundary ─► BODY                         the script asks for a batch behind the last one

The status of the step within a loop body is that of state/step.py. While the run loop moves the script from one place
to another, signals wait (worker/signals.py), so that the state belongs to one of them.
"""

from __future__ import annotations

import enum

from farandole.errors import StepError


class Place(enum.StrEnum):
    """The place of the script. The values stand in error messages."""

    ENTERING = "entering"  # the state is not that of all workers yet
    JOINED = "joined"  # on a newcomer, before its first batch; code that runs once for each worker has run
    BEFORE = "before a batch"  # the first one of the function, of an epoch, or after a regroup
    BODY = "in a loop body"  # from a boundary to the next one
    BEHIND = "behind the batches"  # code that follows the batches of an epoch


MAY_FOLLOW = {
    Place.ENTERING: {Place.BEFORE, Place.JOINED},
    Place.JOINED: {Place.JOINED, Place.BODY, Place.BEHIND},
    Place.BEFORE: {Place.BEFORE, Place.BODY, Place.BEHIND},
    Place.BODY: {Place.BODY, Place.BEHIND, Place.BEFORE},
    Place.BEHIND: {Place.BODY, Place.BEFORE},
}
"""The places to which the script may go from each place."""

# The names of the diagram. A look-up in an Enum takes 0.3 us in Python 3.11.
ENTERING, JOINED, BEFORE, BODY, BEHIND = Place


def without_batch(place: Place) -> Place:
    """Return the place before a batch to which a script at `place` comes by a regroup, or by the next epoch."""
    return moved(place, JOINED if place is JOINED else BEFORE)


def moved(place: Place, to: Place) -> Place:
    """Return the place `to`. Raises StepError for a way that the diagram does not have."""
    if to not in MAY_FOLLOW[place]:
        raise StepError(f"the script is {place}, and not {to}. This is a defect of Farandole")
    return to
