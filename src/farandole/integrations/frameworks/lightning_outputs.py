"""The outputs of Lightning in jobs whose rank 0 may change: a logger of ours, Lightning's own one for TensorBoard, and
its progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from farandole.integrations.frameworks import board_folder
from farandole.integrations.frameworks.board_folder import Board, BoardTracker
from farandole.training.state.tracker import MetricsWriter, Tracker


class TrackerLogger(Logger):  # type: ignore[misc]
    """A logger of Lightning that writes with a Tracker: each step once, whichever worker is rank 0.

    Args:
        target: The path of a file that all hosts see, or another target of a Tracker.

    Raises:
        ConfigError, OSError: While training, as from `Tracker`.

    Examples:
        ```python
        from farandole.frameworks.lightning import TrackerLogger, Trainer

        trainer = Trainer(max_epochs=1, logger=TrackerLogger("metrics.csv"), enable_checkpointing=False)
        ```
    """

    def __init__(self, target: str | os.PathLike[str] | MetricsWriter) -> None:
        super().__init__()
        self.tracker = Tracker(target)
        self._folder = str(Path(target).parent) if isinstance(target, str | os.PathLike) else None

    @property
    def name(self) -> str:
        return "tracker"

    @property
    def version(self) -> str:
        return ""  # ModelCheckpoint makes a folder of it, and it is not known in time

    @property
    def save_dir(self) -> str | None:
        return self._folder

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a Tracker has numbers by step."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.tracker.log(step or 0, **{name: value for name, value in metrics.items() if _is_number(value)})


class _Board(Board):
    """A TensorBoardLogger as a BoardTracker needs it. During training its log_metrics() is replaced by this one."""

    def __init__(self, logger: TensorBoardLogger) -> None:
        self._logger, self._log_metrics = logger, logger.log_metrics
        self._kwargs = dict(logger._kwargs)
        self.tracker = BoardTracker(self)

    @property
    def place(self) -> Any:
        return self._logger.version

    @place.setter
    def place(self, version: Any) -> None:
        self._logger._version = version

    @property
    def folder(self) -> str:
        return str(self._logger.log_dir)

    def name_files(self, suffix: str) -> None:
        self._logger._kwargs = {**self._kwargs, "filename_suffix": self._kwargs.get("filename_suffix", "") + suffix}
        self.close()  # Lightning has opened a file before the training, for hyperparameters

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._log_metrics(values, step)
        self._logger.experiment.flush()

    def close(self) -> None:
        if self._logger._experiment is not None:
            self._logger._experiment.close()
            self._logger._experiment = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        numbers = {name: value for name, value in metrics.items() if _is_number(value)}
        self.tracker.log(step or 0, **numbers)
        others = {name: value for name, value in metrics.items() if name not in numbers}
        if others:
            self._log_metrics(others, step)

    def restore(self) -> None:
        del self._logger.log_metrics
        self._logger._kwargs = self._kwargs


@contextmanager
def tracked(loggers: list[Any]) -> Iterator[list[Tracker]]:
    """Let the loggers write each point once within the `with`; yield their trackers."""
    boards = [_Board(each) for each in loggers if type(each) is TensorBoardLogger and board_folder.can_read()]
    for board in boards:
        board._logger.log_metrics = board.log_metrics
    try:
        yield [each.tracker for each in (*loggers, *boards) if isinstance(each, TrackerLogger | _Board)]
    finally:
        for board in boards:
            board.restore()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor)


# The progress bar -----------------------------------------------------------------------------------------------------


class BarOfRankZero(Callback):
    """Keeps the bar of tqdm on the worker that is rank 0. Lightning decides in fit(), once, which process has one, and
    gives it its length at the start of an epoch, which a worker that begins in the middle does not see."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Give the bar that Lightning has just begun the length of the epoch. Called behind the bar's own hook."""
        for bar in _bars(trainer):
            _describe(bar, trainer)

    def take_rank(self, trainer: Any) -> None:
        """Begin the bar on a worker that has become rank 0, and close it on one that is not any more."""
        for bar in _bars(trainer):
            if bar.is_disabled and trainer.is_global_zero:
                bar.enable()
                bar.train_progress_bar = bar.init_train_tqdm()
                _describe(bar, trainer)
            elif bar.is_enabled and not trainer.is_global_zero:
                bar.train_progress_bar.close()
                bar.disable()


def _bars(trainer: Any) -> list[TQDMProgressBar]:
    """Return the bars that have begun: there is none with enable_progress_bar=False."""
    every = [each for each in trainer.callbacks if isinstance(each, TQDMProgressBar)]
    return [each for each in every if each._train_progress_bar is not None]


def _describe(bar: TQDMProgressBar, trainer: Any) -> None:
    bar.train_progress_bar.total = convert_inf(bar.total_train_batches)
    bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")
