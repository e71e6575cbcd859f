"""The count of backward passes of each parameter since the last step, and its consequences. Pure.

named_path.py and adasum_delta.py count in their hooks; parameters are told apart by `id`.
"""

from __future__ import annotations

from collections.abc import Iterable

_TOO_MANY = (
    "a gradient was computed {count} times before optimizer.step(), expected {expected} times: increase "
    "backward_passes_per_step to {count} to accumulate gradients, or call step() (or synchronize()) after each pass"
)
_RACE = (
    "optimizer.zero_grad() between loss.backward() and optimizer.step(): it would erase gradients that other "
    "workers wait for. Call step() or synchronize() first, or abandon_step() on all workers to drop them"
)


class Passes:
    """The passes from one step to the next.

    per_step  passes after which a gradient is due to be reduced
    """

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self._counts: dict[int, int] = {}
        self._reduced: set[int] = set()

    def count(self, key: int) -> None:
        """Count a backward pass that has left a gradient. Raises AssertionError if it is one too many."""
        count = self._counts.get(key, 0) + 1
        if count > self.per_step:
            raise AssertionError(_TOO_MANY.format(count=count, expected=self.per_step))
        self._counts[key] = count
        self._reduced.discard(key)

    def has_counted(self, key: int) -> bool:
        """Return whether there was a pass since the last step or synchronize()."""
        return key in self._counts

    def are_due(self, keys: Iterable[int]) -> bool:
        """Return whether all parameters have had all their passes."""
        return all(self._counts.get(key, 0) >= self.per_step for key in keys)

    def unreduced(self, keys: Iterable[int]) -> set[int]:
        """Return the parameters whose gradient is not the reduced one."""
        return {key for key in keys if key not in self._reduced}

    def reduced(self, keys: Iterable[int]) -> None:
        self._reduced.update(keys)

    def restart(self) -> None:
        """Count from zero again, after synchronize(); reduced gradients stay marked as reduced."""
        self._counts.clear()

    def forget(self) -> None:
        """Reset the state for the time after a step."""
        self._counts.clear()
        self._reduced.clear()

    def refuse_zeroing(self) -> None:
        """Raise AssertionError while gradients wait for a step."""
        if self._counts:
            raise AssertionError(_RACE)
