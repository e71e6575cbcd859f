"""Epochs as both loaders see them: their numbers, as epochs() hands them out, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from farandole.data.loader_hooks import LoaderHooks
from farandole.errors import StepError
from farandole.membership import Shortfall


class EpochRecord:
    """What a loader knows of its epochs beside its place.

    once_done     calls of Epoch.once() that are done in the current epoch
    cut_epochs    epochs that were ended by `break` before their last batch
    cut_steps     their steps that were not made, as far as they can be counted
    total         what epochs(total) was called with last; None: nothing was promised
    by_trainer    what is left of the promise of a framework's trainer, which counts instead of `total`
    is_through    the current epoch was iterated to its end and not handed out by epochs() since; of this worker only
    """

    def __init__(self) -> None:
        self.once_done = self.cut_epochs = self.cut_steps = 0
        self.total: int | None = None
        self.by_trainer: Shortfall | None = None
        self.is_through = False

    def promise_epochs(self, total: int) -> None:
        """epochs(total) was called."""
        self.total, self.by_trainer = total, None

    def promise_by_trainer(self, left: Shortfall | None) -> None:
        """A framework's trainer decides how many steps there are, and `left` of them were not made."""
        self.total, self.by_trainer = None, left

    def refuse_second_pass(self, epoch: int) -> None:
        """Raise StepError where the loader is iterated again although nothing is left of the epoch: the batches of a
        next epoch would be expected, and none would come."""
        if self.is_through:
            raise StepError(
                f"the loader was iterated again, but all batches of epoch {epoch} are trained and the next epoch was "
                f"not begun: only epochs() goes on to it. In place of `for epoch in range(5):` write "
                f"`for epoch in loader.epochs(5):` around `for batch in loader:`"
            )

    def end_epoch(self, is_whole: bool, steps_left: int = 0) -> None:
        """All workers go on to the next epoch."""
        if not is_whole:
            self.cut_epochs += 1
            self.cut_steps += steps_left
        self.once_done, self.is_through = 0, False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed job has to know; nothing in an ordinary epoch."""
        once = {"once": self.once_done} if self.once_done else {}
        return {**once, "cut": [self.cut_epochs, self.cut_steps]} if self.cut_epochs else once

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what state_dict() has returned, among other entries."""
        self.once_done = state.get("once", 0)
        self.cut_epochs, self.cut_steps = state.get("cut", (0, 0))
        self.is_through = False


class Counting(Protocol):
    """What an Epoch needs of its loader."""

    epoch: int
    hooks: LoaderHooks
    record: EpochRecord


class Epoch(int):
    """An int. After a regroup in the tail of an epoch (an evaluation), and in a job that goes on from a state that was
    saved there, the same number is handed out again, so that code of the tail runs at least once; what is given to
    once() is not repeated."""

    _loader: Counting
    _calls: int

    @classmethod
    def of(cls, loader: Counting) -> Epoch:
        """Return the number of the loader's current epoch; the loader counts the calls of once()."""
        epoch = cls(loader.epoch)
        epoch._loader, epoch._calls = loader, 0
        return epoch

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # kept in a state, it is a number

    def once(self, function: Callable[[], object]) -> bool:
        """Call `function()`, on every worker, once in this epoch: whatever happens, the tracked values of the state
        hold what it did exactly once. All workers call it at the same place; the order of several counts. Whether
        it ran here.

        It begins when all workers have come. When a worker is lost before any other was through, the others do it
        again; when one was through, its state becomes everybody's, and nobody does. What `function` does outside of
        the state (prints a line, writes a file) is then missing on the workers that it did not run on.

        The loader's state_dict() says how many calls are done, the one that runs among them. So a script that saves
        it as the last thing in `function`, or behind it, and goes on from there does not call `function` again.

        Raises PeerLost or GenerationEnded, which elastic.run handles, when a worker is lost meanwhile;
        CollectiveMismatch when workers are at different places.
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
