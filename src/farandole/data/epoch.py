"""Epochs as both loaders see them: their numbers, which epochs() yields, their record, and the hooks at their
boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from farandole.errors import StepError
from farandole.membership import Shortfall


class EpochRecord:
    """A loader's record of its epochs, apart from its position.

    once_done     completed calls of Epoch.once() in the current epoch
    cut_epochs    epochs that were ended by `break` before their last batch
    cut_steps     steps that were not made in these epochs, as far as they can be counted
    total         argument of the last call of epochs(total); None: nothing was promised
    by_trainer    remaining steps promised by a framework's trainer, which count instead of `total`
    is_through    the current epoch was iterated to its end and not yielded by epochs() since; on this worker only
    is_within     epochs() has yielded the current epoch behind its first batch; on this worker only
    """

    def __init__(self) -> None:
        self.once_done = self.cut_epochs = self.cut_steps = 0
        self.total: int | None = None
        self.by_trainer: Shortfall | None = None
        self.is_through = self.is_within = False

    def enter(self, cursor: int) -> None:
        """Record that epochs() yields the current epoch, of which `cursor` samples are trained."""
        self.is_through, self.is_within = False, cursor > 0

    def promise_epochs(self, total: int) -> None:
        """Record a call of epochs(total)."""
        self.total, self.by_trainer = total, None

    def promise_by_trainer(self, left: Shortfall | None) -> None:
        """Record that a framework's trainer decides the number of steps, of which `left` were not made."""
        self.total, self.by_trainer = None, left

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
        return {**once, "cut": [self.cut_epochs, self.cut_steps]} if self.cut_epochs else once

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of state_dict(), which may be among other entries."""
        self.once_done = state.get("once", 0)
        self.cut_epochs, self.cut_steps = state.get("cut", (0, 0))
        self.is_through = False


class EpochLoader(Protocol):
    """The part of a loader that an Epoch needs."""

    epoch: int
    hooks: LoaderHooks
    record: EpochRecord


class Epoch(int):
    """The number of an epoch, as an int.

    After a regroup in the tail of an epoch (an evaluation), and in a job resumed from a state that was saved there, the
    same number is yielded again, so that code of the tail runs at least once; functions given to once() are not
    repeated.
    """

    _loader: EpochLoader
    _calls: int

    @classmethod
    def of(cls, loader: EpochLoader) -> Epoch:
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


# The hooks that a loader calls at each boundary -----------------------------------------------------------------------
#
# The elastic run loop implements them; without one, they do nothing.


class LoaderHooks(Protocol):
    """The calls of a loader at its boundaries, where workers may regroup: before each batch, and at the end of an
    epoch."""

    def reach_boundary(self) -> None:
        """Handle that a batch is about to be handed out. May regroup, and call set_world() and load_state_dict()."""
        ...

    def rehearses(self) -> bool:
        """Return whether the next batch is a rehearsal's: it has no effect, and comes again."""
        ...

    def leave_batches(self) -> bool:
        """Handle the end of the epoch's batches, before the code after them. False: there was a regroup instead, and
        the loader's epoch and cursor are those on which the workers agreed."""
        ...

    def reach_epoch_end(self) -> bool:
        """Handle this worker's end of an epoch. True: all workers have ended it, and the epoch's number advances.
        False: there was a regroup instead, and the loader's epoch and cursor are those on which the workers agreed."""
        ...

    def begin_epoch(self) -> None:
        """Handle that the epoch's number has advanced."""
        ...

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Call the function, the `call`-th one of this epoch, when all workers have arrived at it."""
        ...


class NoLoaderHooks:
    """The hooks of a worker without an elastic run loop."""

    def reach_boundary(self) -> None:
        pass

    def rehearses(self) -> bool:
        return False

    def leave_batches(self) -> bool:
        return True

    def reach_epoch_end(self) -> bool:
        return True

    def begin_epoch(self) -> None:
        pass

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        function()
