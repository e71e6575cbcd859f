"""fd.weight, and the weight of each loop body's gradient in that of the global batch. loader_path.py uses it."""

from __future__ import annotations

import math

from farandole.errors import CollectiveMismatch, StepError
from farandole.state import step
from farandole.state.global_batch import Batch

NOT_GIVEN = -1.0
"""Value in a step header: the number of this rank's samples is the weight."""
NO_SAY = -2.0
"""Value in a step header: this rank has no real sample of the global batch."""


def weight(n: float) -> None:
    """Set the weight of this loop body's loss, which is a mean over `n` items, such as tokens.

    Call it before backward(), in every loop body or in none. The gradient of a step is then that of the mean over all
    items of the global batch, however they are distributed; without it, all samples count alike. The weight of a dummy
    batch does not count.

    Args:
        n: Number of items, may be 0.

    Raises:
        StepError: No batch of a DataLoader of Farandole is out, or backward() of its loop body has run.
        ValueError: n is negative or not finite.
        CollectiveMismatch: Raised by backward() on all workers when only some of them have called weight().
    """
    number = float(n)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"weight: how many things the mean was taken over must be 0 or more, got {n}")
    if step.batch() is None:
        raise StepError("weight() is for the loop over a DataLoader of Farandole, and no batch of one is out")
    step.set_weight(number)


class Weights:
    """The weights of one global batch's loop bodies on this rank. `loss`: "mean" or "sum"."""

    def __init__(self, loss: str) -> None:
        self._loss = loss
        self._said: dict[int, float | None] = {}

    def forget(self) -> None:
        """Drop the weights for the next global batch."""
        self._said.clear()

    def record(self, batch: Batch) -> float:
        """Record the weight of a loop body. Returns the factor for its gradients. Raises StepError."""
        given = step.weight()
        if batch.is_dummy:
            return 0.0
        if self._loss == "sum":
            if given is not None:
                raise StepError(f'weight({given:g}) with loss="sum": a sum needs no weights; leave one of them out')
            return 1.0
        self._said[batch.index] = given
        # Of the same magnitude as with equal samples, so that gradients neither overflow nor vanish on the way.
        return batch.weight if given is None else given / batch.global_batch.global_samples

    def said(self) -> float:
        """Return the value for the step header: the sum of the weights, NOT_GIVEN or NO_SAY. Raises StepError."""
        given = [each for each in self._said.values() if each is not None]
        if given and len(given) < len(self._said):
            raise StepError("weight() in some micro-batches of a global batch and not in others; call it in all")
        if given:
            return sum(given)
        return NOT_GIVEN if self._said else NO_SAY


def total(said: list[float]) -> float | None:
    """Return the weight of the global batch, from the headers of all ranks; None when its samples count.

    Raises CollectiveMismatch, alike on every rank, when only some ranks have called weight().
    """
    without = [rank for rank, each in enumerate(said) if each == NOT_GIVEN]
    given = [each for each in said if each >= 0]
    if given and without:
        raise CollectiveMismatch(
            f"ranks {without} did not call weight() for this global batch, others did; call it on every worker, in "
            f"every loop body, or nowhere; nothing was applied"
        )
    return sum(given) if given else None
