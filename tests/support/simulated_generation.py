"""A generation as its simulated members know it. Used by simulated_job.py and simulated_worker.py."""

from __future__ import annotations

from collections.abc import Sequence


class SimulatedGeneration:
    """Who has come, and who is in step. Kept up to date by the members, so that no member has to look at all others: a
    job of thousands of workers costs as much for each of them as a small one.

    absent    members that have not entered it yet, or have left it
    unsynced  members that have not reported that their state is confirmed
    step      the steps in the state that all members get from one source; None until they have met
    agreed    the number of the planned generation to which the members have agreed to move, or "finish"
    """

    def __init__(self, number: int, members: Sequence[str], is_bootstrap: bool) -> None:
        self.number = number
        self.members = tuple(members)
        self.is_bootstrap = is_bootstrap
        self.ranks = {name: rank for rank, name in enumerate(members)}
        self.absent = set(members)
        self.unsynced = set(members)
        self.step: int | None = None
        self.agreed: int | str | None = None

    def neighbours(self, name: str) -> set[str]:
        """Return the members beside this one on the ring."""
        rank = self.ranks[name]
        return {self.members[rank - 1], self.members[(rank + 1) % len(self.members)]} - {name}


class TrainingInvariants:
    """What must hold among the workers, whatever they were told: one generation trains at a time, its members get the
    state from one source, and no step is lost that was in the state of all members."""

    def __init__(self) -> None:
        self._newest = 0
        self._step = 0

    def has_met(self, generation: SimulatedGeneration, steps: Sequence[int]) -> int:
        """Record that all members have met, with so many steps in the state of each, by rank. Return the steps in the
        state that they continue from: that of rank 0 in a bootstrap, else one with the most steps."""
        number = generation.number
        assert number > self._newest, f"generation {number} meets after {self._newest}: a split brain"
        step = steps[0] if generation.is_bootstrap else max(steps)
        assert generation.is_bootstrap or step >= self._step, (
            f"generation {number} goes back from {self._step} to {step}"
        )
        self._newest, self._step = number, step
        return step

    def trains(self, generation: SimulatedGeneration) -> None:
        """Record that a member works in this generation."""
        assert generation.number == self._newest, f"work in generation {generation.number} beside {self._newest}"
