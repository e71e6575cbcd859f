"""fd.weight, and what the gradient of each loop body counts in that of the global batch. loader_path.py uses it."""

from __future__ import annotations

import math

from farandole.errors import CollectiveMismatch, StepError
from farandole.state import step
from farandole.state.global_batch import Batch

NOT_GIVEN = -1.0
"""In a step header: this rank's samples count."""
NO_SAY = -2.0
"""In a step header: this rank has no real sample of the global batch."""


def weight(n: float) -> None:
    """The loss of this loop body is a mean over `n` things, tokens for one: call it before backward().

    With it the gradient of a step is that of the mean over all things of the global batch, whoever has how many;
    without, all samples count alike. In every loop body, or in none. n may be 0. What a dummy batch says does not
    count.

    Raises StepError when no batch of a DataLoader of Farandole is out, or after the backward() of its loop body;
    ValueError for an n that is negative or not finite. CollectiveMismatch in backward(), on all workers, when only
    some of them have called it.
    """
    number = float(n)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"weight: how many things the mean was taken over must be 0 or more, got {n}")
    if step.batch() is None:
        raise StepError("weight() is for the loop over a DataLoader of Farandole, and no batch of one is out")
    step.set_weight(number)


class Weights:
    """What the loop bodies of one global batch have said on this rank. `loss`: "mean" or "sum"."""

    def __init__(self, loss: str) -> None:
        self._loss = loss
        self._said: dict[int, float | None] = {}

    def forget(self) -> None:
        """The next global batch."""
        self._said.clear()

    def record(self, batch: Batch) -> float:
        """Take note of what was said for a loop body; the factor for its gradients. Raises StepError."""
        given = step.weight()
        if batch.is_dummy:
            return 0.0
        if self._loss == "sum":
            if given is not None:
                raise StepError(f'weight({given:g}) with loss="sum": a sum needs no weights; leave one of them out')
            return 1.0
        self._said[batch.index] = given
        # As large as with equal samples, so that gradients neither overflow nor vanish on the way.
        return batch.weight if given is None else given / batch.global_batch.global_samples

    def said(self) -> float:
        """For the step header: the sum of what was said, NOT_GIVEN or NO_SAY. Raises StepError."""
        given = [each for each in self._said.values() if each is not None]
        if given and len(given) < len(self._said):
            raise StepError("weight() in some micro-batches of a global batch and not in others; call it in all")
        if given:
            return sum(given)
        return NOT_GIVEN if self._said else NO_SAY


def total(said: list[float]) -> float | None:
    """The weight of the global batch, from the headers of all ranks; None when its samples count.

    Raises CollectiveMismatch, alike on every rank, when only some ranks have called weight()."""
    without = [rank for rank, each in enumerate(said) if each == NOT_GIVEN]
    given = [each for each in said if each >= 0]
    if given and without:
        raise CollectiveMismatch(
            f"ranks {without} did not call weight() for this global batch, others did; call it on every worker, in "
            f"every loop body, or nowhere; nothing was applied"
        )
    return sum(given) if given else None
