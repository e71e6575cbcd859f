"""The outputs of transformers in jobs whose rank 0 may change: a callback of ours for logs, its own one for
TensorBoard, and its progress bar."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import transformers
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.integrations.integration_utils import TensorBoardCallback, default_logdir, rewrite_logs
from transformers.trainer_callback import ProgressCallback

from farandole.integrations.frameworks import board_folder
from farandole.integrations.frameworks.board_folder import Board, BoardTracker
from farandole.training.state.session import SESSION
from farandole.training.state.tracker import MetricsWriter, Tracker


class TrackerCallback(transformers.TrainerCallback):
    """Writes the numbers of the logs with a Tracker: each step once, whichever worker is rank 0.

    Args:
        target: The path of a file that all hosts see, or another target of a Tracker.

    Raises:
        ConfigError, OSError: While training, as from `Tracker`.

    Examples:
        ```python
        from farandole.frameworks.transformers import TrackerCallback, Trainer

        trainer = Trainer(classifier, arguments, train_loader=loader, callbacks=[TrackerCallback("metrics.csv")])
        ```
    """

    def __init__(self, target: str | os.PathLike[str] | MetricsWriter) -> None:
        self.tracker = Tracker(target)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.tracker.log(state.global_step, **_numbers(logs))


class FolderCallback(TensorBoardCallback, Board):
    """transformers' callback for TensorBoard, in a folder that is the same on all workers, with each point once."""

    def __init__(self, args: transformers.TrainingArguments) -> None:
        super().__init__()
        self.logging_dir: Any = self.logging_dir or os.path.join(args.output_dir, default_logdir())
        self._args, self._suffix = args, ""
        self.tracker: Tracker = BoardTracker(self)

    # What a BoardTracker needs -----------------------------------------------------------------------------

    @property
    def place(self) -> Any:
        return self.logging_dir

    @place.setter
    def place(self, folder: Any) -> None:
        self.logging_dir = folder

    @property
    def folder(self) -> str:
        return str(self.logging_dir)

    def name_files(self, suffix: str) -> None:
        self._suffix = suffix

    def _init_summary_writer(self, args: Any) -> None:
        self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, filename_suffix=self._suffix)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.tb_writer is None:
            self._init_summary_writer(self._args)
        for name, value in values.items():
            self.tb_writer.add_scalar(name, value, step)
        self.tb_writer.flush()

    def close(self) -> None:
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None

    # What the Trainer calls --------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the arguments once in a job: a survivor of a fault may come here again."""
        if not board_folder.files_of(self.folder, self.tracker.run):
            super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not SESSION.is_elastic:
            super().on_log(args, state, control, logs=logs, **kwargs)
            return
        numbers = _numbers(logs)
        self.tracker.log(state.global_step, **rewrite_logs(numbers))
        texts = {name: value for name, value in logs.items() if name not in numbers}
        if texts:
            super().on_log(args, state, control, logs=texts, **kwargs)


def in_one_folder(callback: Any, args: transformers.TrainingArguments) -> Any:
    """Return the callback to use in place of another one: ours for transformers' own, if it was not changed."""
    is_plain = type(callback) is TensorBoardCallback and callback.tb_writer is None
    return FolderCallback(args) if is_plain and board_folder.can_read() else callback


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if isinstance(value, int | float)}


# The progress bar -----------------------------------------------------------------------------------------------------


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
