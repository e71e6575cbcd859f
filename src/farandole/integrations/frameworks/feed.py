"""The data feed of a framework that owns the training loop: one batch for each decided step, without repetitions.

A framework assumes one process, and an optimizer that steps at each call. So a batch that is repeated after a fault,
and the further micro-batches of a global batch, are trained inside the framework's current step. Where that is
impossible (the framework would count wrongly), its loop is left and entered anew at the current position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from farandole.base.membership import Shortfall
from farandole.elastic import StepState, run
from farandole.errors import ConfigError
from farandole.training.data.epochs import Epoch
from farandole.training.data.loader import DataLoader
from farandole.training.state import step
from farandole.training.state.step import StepStatus

ResultT = TypeVar("ResultT")

_NOTHING = object()


class Again(BaseException):
    """Leave the framework's loop, and enter it anew at the current position. Not an Exception: no framework may handle
    it."""


class Feed:
    """The iterable of a framework, once per epoch, in place of the loader.

    The first pass begins at the current position, in the middle of an epoch for a worker that joins there; len() is
    that of a whole epoch. Raises ConfigError for a loader that is not an elastic.DataLoader, or whose epochs differ in
    length.
    """

    def __init__(self, loader: object) -> None:
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"the training loader must be a farandole.elastic.DataLoader, got {type(loader).__name__}: write "
                f"fd.elastic.DataLoader(dataset, global_batch_size=...)"
            )
        if loader.state_dict().get("tail") == "carry":
            raise ConfigError(
                'tail="carry" makes epochs of different lengths, which frameworks do not support; use another tail'
            )
        self.loader = loader
        self._state: StepState | None = None
        self._epochs = 0
        self._numbers: Iterator[Epoch] | None = None
        self._batches: Iterator[Any] = iter(())
        self._ahead: Any = _NOTHING  # a batch that was fetched, and not handed out yet

    # The elastic function --------------------------------------------------------------------------------

    def train(
        self,
        state: StepState,
        epochs: int,
        steps: float,
        enter: Callable[[bool], ResultT],
        is_stopped: Callable[[], bool],
    ) -> ResultT:
        """Run the framework's loop, by `enter`, as an elastic function, and return its value.

        steps       optimizer steps that the framework has promised; infinite or below 0: unknown
        enter       starts at `place()`; called again when the loop was left early. Its argument is whether there is
                    anything left to train
        is_stopped  returns whether the framework has decided to stop; part of `state`
        """
        self._state, self._epochs = state, epochs

        def call(_: StepState) -> ResultT:
            self._numbers, self._ahead = None, _NOTHING
            while True:
                try:
                    result = enter(not is_stopped() and self._fetch())
                except Again:
                    continue
                if self.loader.fraction >= 1.0:
                    self._fetch()  # the end of the last epoch: all workers arrive here
                self.loader.record.promise_by_trainer(None if is_stopped() else self._left_of(steps))
                return result

        return run(call)(state)

    @property
    def place(self) -> tuple[int, int, int]:
        """The position of the training: the epoch, global batches trained in it, steps decided since the start of the
        job."""
        assert self._state is not None
        size = int(self.loader.state_dict()["global_batch_size"])
        return self.loader.epoch, -(-self.loader.cursor // size), self._state.step

    def _left_of(self, steps: float) -> Shortfall | None:
        """Return the part of the framework's promised steps that is not done."""
        assert self._state is not None
        if not self._state.step < steps < math.inf:
            return None
        return Shortfall(0, 0, int(steps), int(steps) - self._state.step)

    # The framework iterates ------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The loader's dataset. Frameworks look at its length."""
        return self.loader.dataset

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state. Lightning warns of loaders without one, when it begins in the middle of an
        epoch."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._ahead is _NOTHING and not self._fetch():
            return
        while self._ahead is not _NOTHING:
            batch, self._ahead = self._ahead, _NOTHING
            yield batch
            # A worker that has joined in the middle of an epoch asks for more than its batches, the others do not. All
            # of them have to go on to the end of the epoch: at another boundary they would wait for each other.
            if self.loader.is_over:
                return
            self._ahead = self._next()

    def _fetch(self) -> bool:
        """Fetch the next batch, of this epoch or, where all workers have finished it, of the next one. False: there is
        none."""
        if self._ahead is not _NOTHING:
            return True
        if self._numbers is None:
            self._numbers = self.loader.epochs(self._epochs)
        for _ in self._numbers:
            self._batches = iter(self.loader)
            self._ahead = self._next()
            if self._ahead is not _NOTHING:
                return True
        return False

    def _next(self) -> Any:
        """Return the next batch. Skips the one that is handed out again after an epoch: a framework would count it."""
        batch = next(self._batches, _NOTHING)
        while batch is not _NOTHING and step.is_rehearsal() and self.loader.is_over:
            batch = next(self._batches, _NOTHING)
        return batch

    # A step of the framework -----------------------------------------------------------------------------

    def until_reduced(self, batch: Any, compute: Callable[[Any], ResultT]) -> ResultT:
        """Call `compute(batch)`, forward and backward, until the gradients of a whole global batch are complete: then
        the next step() applies them on all workers. Return the value of the last call.

        Raises Again when the step turns out to be decided already, by workers that were ahead of this one.
        """
        assert self._state is not None
        decided = self._state.step
        while True:
            optimizer = self._state.optimizer
            optimizer.zero_grad()  # the rest of an aborted step; nothing while micro-batches are being added up
            result = compute(batch)
            optimizer.synchronize()  # also parameters without a gradient: a fault must show here, not in step()
            if step.status() is StepStatus.REDUCED:
                return result
            optimizer.step()  # of a micro-batch, or of a step that was aborted: it applies nothing
            batch = self._next()
            if self._state.step != decided:
                self._ahead = batch
                raise Again
