"""The set of optimizers that reduce gradients for the same global batch. Only a single optimizer may reduce in the
background: with two, ranks could begin with different ones. loader_path.py reports each optimizer."""

from __future__ import annotations

from farandole.errors import StepError
from farandole.state.global_batch import GlobalBatch


class ActiveOptimizers:
    """The active optimizers; one object in each process. Optimizers are told apart by `id`."""

    def __init__(self) -> None:
        self._global_batch: GlobalBatch | None = None
        self._now: set[int] = set()
        self._before: set[int] = set()  # for the last global batch
        self._overlapping: int | None = None

    def add(self, key: int, global_batch: GlobalBatch) -> None:
        """Note that an optimizer takes part in this global batch."""
        if global_batch is not self._global_batch:
            self._global_batch, self._before, self._now = global_batch, self._now, set()
        self._now.add(key)

    def is_alone(self, key: int) -> bool:
        """Return whether no other optimizer took part in this global batch and the last one."""
        return self._before == self._now == {key}

    def begin_overlap(self, key: int) -> None:
        """Note that the optimizer's reduction overlaps with backward, until end_overlap()."""
        self._overlapping = key

    def end_overlap(self, key: int) -> None:
        if self._overlapping == key:
            self._overlapping = None

    def refuse_reducing(self, key: int) -> None:
        """Raise StepError while another optimizer reduces in the background."""
        if self._overlapping not in (None, key):
            raise StepError(
                "an optimizer that had no part in the last steps takes part in the backward pass of another one; set "
                "FARANDOLE_BUCKET_MB=0 so that nothing is reduced before backward() has ended"
            )
