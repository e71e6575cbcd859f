"""Epochs as both loaders see them: their numbers, which epochs() yields, and their record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from farandole.base.membership import Shortfall
from farandole.errors import StepError

if TYPE_CHECKING:
    from farandole.training.data.elastic_loader import ElasticLoader


class EpochRecord:
    """A loader's record of its epochs, apart from its position.

    once_done     completed calls of Epoch.once() in the current epoch
    cut_epochs    epochs that were ended by `break` before their last batch
    cut_steps     steps that were not made in these epochs, as far as they can be counted
    total, steps  arguments of the last call of epochs(); both None: nothing was promised
    by_trainer    remaining steps promised by a framework's trainer, which count instead of `total`
    skipped, partial  decided steps that have trained none of their samples; not all of them
    decided       decided steps; part of the state where steps were promised
    last          the epoch in which the last promised step was decided; -1: not yet
    is_through    the current epoch was iterated to its end and not yielded by epochs() since; on this worker only
    is_within     epochs() has yielded the current epoch behind its first batch; on this worker only
    """

    def __init__(self) -> None:
        self.once_done = self.cut_epochs = self.cut_steps = self.decided = 0
        self.skipped = self.partial = 0
        self.last = -1
        self.total: int | None = None
        self.steps: int | None = None
        self.by_trainer: Shortfall | None = None
        self.is_through = self.is_within = False

    def enter(self, cursor: int) -> None:
        """Record that epochs() yields the current epoch, of which `cursor` samples are trained."""
        self.is_through, self.is_within = False, cursor > 0

    def promise(self, total: int | None, steps: int | None) -> None:
        """Record a call of epochs()."""
        self.total, self.steps, self.by_trainer = total, steps, None

    def promise_by_trainer(self, left: Shortfall | None) -> None:
        """Record that a framework's trainer decides the number of steps, of which `left` were not made."""
        self.total, self.steps, self.by_trainer = None, None, left

    def decide(self, epoch: int) -> None:
        """Record that a step of this epoch is decided."""
        self.decided += 1
        if self.decided == self.steps:
            self.last = epoch

    @property
    def has_all_steps(self) -> bool:
        """True when all promised steps are decided; False where none were promised."""
        return self.steps is not None and self.decided >= self.steps

    def is_done(self, epoch: int) -> bool:
        """Return whether epochs() does not yield this epoch any more."""
        if self.total is not None:
            return epoch >= self.total
        return self.has_all_steps and epoch > self.last

    def shortfall(self) -> Shortfall | None:
        """Return the part of the promised steps that was not made, where steps were promised."""
        if self.steps is None or self.has_all_steps:
            return self.by_trainer
        return Shortfall(0, 0, self.steps, self.steps - self.decided)

    def refuse_second_pass(self, epoch: int) -> None:
        """Raise StepError where the loader is iterated again although nothing is left of the epoch: the user would
        expect the batches of the next epoch, and none would come.

        A worker that enters in the middle of an epoch is not refused. In a body with two loops over the batches it is
        in the first one while the others are in the second one, where they may get the last batch.
        """
        if self.is_through and not self.is_within:
            raise StepError(
                f"the loader was iterated again, but all batches of epoch {epoch} are trained, and only "
                f"epochs() starts the next epoch. Replace `for epoch in range(5):` with "
                f"`for epoch in loader.epochs(5):` around `for batch in loader:`"
            )

    def end_epoch(self, is_whole: bool, steps_left: int = 0) -> None:
        """End the epoch, when all workers enter the next one."""
        if not is_whole:
            self.cut_epochs += 1
            self.cut_steps += steps_left
        self.once_done, self.is_through = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the data that a resumed job needs; empty in an ordinary epoch."""
        once = {"once": self.once_done} if self.once_done else {}
        cut = {"cut": [self.cut_epochs, self.cut_steps]} if self.cut_epochs else {}
        decided = {"decided": [self.decided, self.last]} if self.steps is not None else {}
        untrained = {"untrained": [self.skipped, self.partial]} if self.skipped or self.partial else {}
        return {**once, **cut, **decided, **untrained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of state_dict(), which may be among other entries."""
        self.once_done = state.get("once", 0)
        self.cut_epochs, self.cut_steps = state.get("cut", (0, 0))
        self.decided, self.last = state.get("decided", (0, -1))
        self.skipped, self.partial = state.get("untrained", (0, 0))
        self.is_through = False


class Epoch(int):
    """The number of an epoch, as an int.

    After a regroup in the tail of an epoch (an evaluation), and in a job resumed from a state that was saved there, the
    same number is yielded again, so that code of the tail runs at least once; functions given to once() are not
    repeated.
    """

    _loader: ElasticLoader
    _calls: int

    @classmethod
    def of(cls, loader: ElasticLoader) -> Epoch:
        """Return the number of the loader's current epoch; the loader counts the calls of once()."""
        epoch = cls(loader.epoch)
        epoch._loader, epoch._calls = loader, 0
        return epoch

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # saved in a state, it is a number

    def once(self, function: Callable[[], object]) -> bool:
        """Call `function()` on every worker, once in this epoch.

        Whatever happens, the tracked values of the state hold its effect exactly once. All workers call it at the same
        place; the order of several calls counts.

        It begins when all workers have arrived. When a worker is lost before any other has finished, the others repeat
        it. When one has finished, its state is copied to all, and no worker repeats it. Effects of `function` outside
        of the state (a printed line, a written file) are then missing on the workers on which it did not run.

        The loader's state_dict() has the number of completed calls, including the one that is running. So a script that
        saves it at the end of `function`, or after it, and resumes from there does not call `function` again.

        Args:
            function: A function without arguments.

        Returns:
            Whether it ran on this worker.

        Raises:
            PeerLost, GenerationEnded: A worker was lost meanwhile; elastic.run handles them.
            CollectiveMismatch: Workers are at different places.
        """
        call, self._calls = self._calls, self._calls + 1
        record = self._loader.record
        if self._loader.epoch == self and call < record.once_done:
            return False

        def count() -> None:
            before = record.once_done
            if self._loader.epoch == self:
                record.once_done = call + 1
            try:
                function()
            except BaseException:
                record.once_done = before
                raise

        self._loader.hooks.once(int(self), call, count)
        return True
