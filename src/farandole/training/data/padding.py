"""Loop bodies behind the last micro-batch: padding, where a body accumulates; and the message where it does not."""

from __future__ import annotations

from typing import Any

from farandole.errors import StepError
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.step import StepStatus

_MOST_PADDING = 10_000


class Padding:
    """The padding of a loader: batches that do not count, until a body that accumulates has called step().

    is_allowed  the user accumulates; else a body without step() is an error
    """

    def __init__(self, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self._data: Any = None
        self._count = 0

    def keep(self, data: Any) -> None:
        """Keep the batch that is handed out, to hand it out once more."""
        self._count = 0
        if self.is_allowed:
            self._data = data

    def is_due(self, batch: Batch | None) -> bool:
        """Return whether all gradients are reduced and the loop body has neither stepped nor dropped them."""
        is_reduced = batch is not None and batch.is_last and step.status() is StepStatus.REDUCED
        return self.is_allowed and is_reduced and not step.facts().is_dropped

    def next(self, batch: Batch | None) -> tuple[Batch, list[int], Any]:
        """Return a batch that does not count, its samples (none), and the last micro-batch's data again. Raises
        StepError when the body never steps."""
        assert batch is not None
        self._count += 1
        if self._count > _MOST_PADDING:
            raise StepError(
                f"the loop body ran {_MOST_PADDING} times since the gradients of samples [{batch.global_batch.start}, "
                f"{batch.global_batch.stop}) were reduced, without a call of optimizer.step()"
            )
        padding = batch.padding()
        step.pad(padding)
        return padding, [], self._data


def without_step(global_batch: GlobalBatch, status: StepStatus) -> str:
    """Return the message for a loop body that has made no step."""
    what = f"samples [{global_batch.start}, {global_batch.stop}) of epoch {global_batch.epoch}"
    if status is StepStatus.DECIDED:
        return (
            f"the step for {what} was applied, but the loader has no commit for it: pass the loader to "
            f"TorchState(loader=...), or call loader.commit(loader.global_batch) after the step"
        )
    if status is StepStatus.OPEN and not step.is_noticed():
        return (
            f"the next batch was requested, and no DistributedOptimizer has reduced gradients for {what}: an optimizer "
            f"of torch trains this worker's part only. Write optimizer = fd.DistributedOptimizer(optimizer) and pass "
            f"it to TorchState(optimizer=...), or pass a DistributedDataParallel as the model of TorchState"
        )
    missing = "optimizer.step()" if status is StepStatus.REDUCED else "backward() and optimizer.step()"
    return (
        f"the next batch was requested without {missing} for {what}: a run of the loop body calls step() of a "
        f"DistributedOptimizer, and all workers together may leave out single batches"
    )
