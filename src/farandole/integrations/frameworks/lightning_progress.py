"""Lightning's progress bar in jobs whose rank 0 may change. lightning.py adds it to a Trainer's callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf


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
