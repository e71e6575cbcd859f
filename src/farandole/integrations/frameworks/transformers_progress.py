"""transformers' progress bar for jobs whose rank 0 may change. transformers.py uses it in place of the original."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.trainer_callback import ProgressCallback


class StepsCallback(ProgressCallback):
    """transformers' progress bar, which shows the steps of the whole training on the worker that is rank 0.

    Transformers' loop begins again after some faults, and in the middle on a worker that joins: the bar goes on, or
    begins at the step where the training is. The bar of a worker that is not rank 0 any more is closed.
    """

    training_bar: Any
    prediction_bar: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._place_bar(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._place_bar(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._place_bar(state)
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close()

    def _place_bar(self, state: Any) -> None:
        """Show the steps that are done, on rank 0 only."""
        if not state.is_world_process_zero:
            self._close()
            return
        if self.training_bar is None:
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)
        self.training_bar.update(state.global_step - self.training_bar.n)

    def _close(self) -> None:
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.training_bar = self.prediction_bar = None
