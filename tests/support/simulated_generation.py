"""A generation as its simulated members know it. Used by simulated_job.py and simulated_worker.py."""

from __future__ import annotations

from collections.abc import Sequence


class SimulatedGeneration:
    """Who has come, and who is in step. Kept up to date by the members, so that no member has to look at all others: a
    job of thousands of workers costs as much for each of them as a small one.

    absent    members that have not entered it yet, or have left it
    unsynced  members that have not reported that their state is confirmed
    has_met   all members were there at the same time: they sync
    agreed    the number of the planned generation to which the members have agreed to move, or "finish"
    """

    def __init__(self, members: Sequence[str]) -> None:
        self.members = tuple(members)
        self.ranks = {name: rank for rank, name in enumerate(members)}
        self.absent = set(members)
        self.unsynced = set(members)
        self.has_met = False
        self.agreed: int | str | None = None

    def neighbours(self, name: str) -> set[str]:
        """Return the members beside this one on the ring."""
        rank = self.ranks[name]
        return {self.members[rank - 1], self.members[(rank + 1) % len(self.members)]} - {name}
