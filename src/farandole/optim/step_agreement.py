"""The last reduction of a step: the header of this rank, and the conclusions from the headers of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farandole.collectives import world
from farandole.errors import CollectiveMismatch, StepError
from farandole.optim.header import StepHeader, check, ids_hash
from farandole.state import loop_hooks, recording, step
from farandole.state.global_batch import Batch


def header_of(batch: Batch, plan: int, own_weight: float) -> StepHeader:
    """Return the header of this rank. It must be made before anything is contributed, since the ledger's intent is
    written here. `plan`: parameters.digest()."""
    global_batch = batch.global_batch
    return StepHeader(
        generation=world.current().id.number,
        step=loop_hooks.steps_decided(),
        plan=plan,
        epoch=global_batch.epoch,
        start=global_batch.start,
        stop=global_batch.stop,
        samples=global_batch.samples,
        prepared=loop_hooks.prepared(),
        weight=own_weight,
        ids_hash=recording.intend(batch),
        digest=loop_hooks.digest(),
        saved=int(loop_hooks.has_saved()),
    )


def conclude(headers: Sequence[StepHeader], batch: Batch) -> float:
    """Check that all ranks have reduced the same step. Returns the remaining factor for its gradients. Raises
    CollectiveMismatch, alike on every rank, if they have not."""
    all_headers = list(headers)
    check(all_headers)
    weight = total([header.weight for header in all_headers])
    recording.agree(sum(header.samples for header in all_headers), ids_hash(all_headers))
    loop_hooks.agree([header.prepared for header in all_headers])
    loop_hooks.compare([header.digest for header in all_headers], any(header.saved for header in all_headers))
    return batch.global_batch.global_samples / weight if weight else 1.0  # with 0, nothing was added up


def absorb() -> bool:
    """Handle a failed collective of the open step. True: the step is aborted, and its batch comes again. False: this is
    not possible, and the error has to propagate."""
    if not step.is_undecided():
        return False
    step.abort()
    return loop_hooks.can_repeat()


# fd.weight, and the weight of each loop body's gradient in that of the global batch -----------------------------------

NOT_GIVEN = -1.0
"""Value in a step header: the number of this rank's samples is the weight."""
NO_SAMPLES = -2.0
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
        raise ValueError(f"weight: the number of items in the mean must be 0 or more, got {n}")
    if step.batch() is None:
        raise StepError("weight() can be called only within the loop over a DataLoader of Farandole")
    step.set_weight(number)


class Weights:
    """The weights of one global batch's loop bodies on this rank. `loss`: "mean" or "sum"."""

    def __init__(self, loss: str) -> None:
        self._loss = loss
        self._by_body: dict[int, float | None] = {}

    def forget(self) -> None:
        """Drop the weights for the next global batch."""
        self._by_body.clear()

    def record(self, batch: Batch) -> float:
        """Record the weight of a loop body. Returns the factor for its gradients. Raises StepError."""
        given = step.weight()
        if batch.is_dummy:
            return 0.0
        if self._loss == "sum":
            if given is not None:
                raise StepError(f'weight({given:g}) with loss="sum": a sum needs no weights; leave one of them out')
            return 1.0
        self._by_body[batch.index] = given
        # Of the same magnitude as with equal samples, so that gradients neither overflow nor vanish on the way.
        return batch.weight if given is None else given / batch.global_batch.global_samples

    def header_weight(self) -> float:
        """Return the value for the step header: the sum of the weights, NOT_GIVEN or NO_SAMPLES. Raises StepError."""
        given = [each for each in self._by_body.values() if each is not None]
        if given and len(given) < len(self._by_body):
            raise StepError(
                "weight() was called in some micro-batches of a global batch and not in others; call it in all"
            )
        if given:
            return sum(given)
        return NOT_GIVEN if self._by_body else NO_SAMPLES


def total(weights: list[float]) -> float | None:
    """Return the weight of the global batch, from the headers of all ranks; None when its samples count.

    Raises CollectiveMismatch, alike on every rank, when only some ranks have called weight().
    """
    without = [rank for rank, each in enumerate(weights) if each == NOT_GIVEN]
    given = [each for each in weights if each >= 0]
    if given and without:
        raise CollectiveMismatch(
            f"ranks {without} did not call weight() for this global batch, other ranks did; call it on every worker, "
            f"in every loop body, or never; nothing was applied"
        )
    return sum(given) if given else None
