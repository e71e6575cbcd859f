"""A Trainer of Hugging Face's transformers whose train() is elastic. Scripts use it in place of transformers.Trainer.

It overrides methods that are not a public interface: pyproject.toml lists the tested versions.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import transformers
from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import ParallelMode
from transformers.utils import is_datasets_available

from farandole.base.env import hide_torchrun_place
from farandole.elastic import DataLoader, TorchState
from farandole.errors import ConfigError
from farandole.integrations.frameworks.feed import Feed
from farandole.integrations.frameworks.transformers_outputs import (
    FolderCallback,
    StepsCallback,
    TrackerCallback,
    in_one_folder,
)
from farandole.training.collectives import world
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.optim.optimizer_mixin import WrappedOptimizer
from farandole.training.optim.step_agreement import weight

__all__ = ["TrackerCallback", "Trainer"]

# TrainingArguments(...) opens a process group of fixed size where it finds LOCAL_RANK (accelerate 1.15, state.py,
# PartialState), and scripts make them before the Trainer.
hide_torchrun_place()


class Trainer(transformers.Trainer):
    """A transformers.Trainer for `farandole run`: train() continues when workers come and go.

    - A step of the Trainer's is one of Farandole's: callbacks, global_step and the scheduler see each one once, however
      often it was repeated, and however many micro-batches it has.
    - Where the Trainer counts the labels of a batch (`num_items_in_batch`), the loss is the mean over those of the
      global batch, however they are divided among workers; else the mean over its samples.
    - Model, optimizer, scheduler, the best metric, the attributes that callbacks export and the decision to stop are
      the same on all workers after each change. All other values of a callback, and the history of logs, are each
      worker's own.
    - Every worker runs evaluations, on the whole eval_dataset.
    - Rank 0 writes checkpoints, prints, and has the progress bar, which shows the steps of the whole training; the loss
      that it prints is that of its local batch. When workers are lost, another worker may become rank 0 and does so.
      `report_to="tensorboard"` then continues in the same folder, with each point once; for other loggers see
      TrackerCallback.
    - A worker that joins sees on_train_begin; so does, now and then, a survivor of a fault.
    - The loader makes the batches: per_device_train_batch_size and group_by_length have no effect.
    - `load_best_model_at_end` loads the best checkpoint on all workers when train() has come to its end, behind
      on_train_end. It needs an output_dir that all hosts see.

    Args:
        model: The model, equal on all workers.
        args: The TrainingArguments.
        train_loader: A loader of Farandole.
        train_dataset: In place of `train_loader`: a data set, of which the Trainer makes an `elastic.DataLoader` with
            its data_collator and args.seed, args.data_seed, args.dataloader_num_workers and args.dataloader_drop_last.
        global_batch_size: With `train_dataset`, number of samples of a step on all workers together.
        **kwargs: Further arguments of transformers.Trainer.

    Raises:
        ConfigError: An unsupported feature is used: see _refuse(); train(resume_from_checkpoint=),
            hyperparameter_search().
        NotInitialized: init() was not called before.

    Examples:
        ```python
        import transformers

        from farandole.frameworks.transformers import Trainer

        loader = fd.elastic.DataLoader(labelled, global_batch_size=16, collate_fn=transformers.default_data_collator)
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = Trainer(classifier, arguments, train_loader=loader)
        result = trainer.train()
        ```
    """

    optimizer: Any

    def __init__(
        self,
        model: Any,
        args: transformers.TrainingArguments,
        *,
        train_loader: Any = None,
        train_dataset: Any = None,
        global_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("model_init") is not None:
            raise ConfigError(
                "Trainer(model_init=...) is not supported by Farandole: pass the model; every worker must start with "
                "the same model"
            )
        _refuse(args)
        world.current()  # NotInitialized here is clearer than later
        _refuse_data(train_loader, train_dataset, global_batch_size, args)
        if train_loader is not None:
            self._feed = Feed(train_loader)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        if train_loader is None and global_batch_size is not None:
            self._feed = Feed(self._loader_of(train_dataset, global_batch_size))
        self._newest_save: tuple[int, tuple[Any, ...], dict[str, Any]] | None = None  # its step, and its arguments
        if self.pop_callback(DEFAULT_PROGRESS_CALLBACK) is not None:
            self.add_callback(StepsCallback)
        self.callback_handler.callbacks.insert(0, _EpochOfTheLoader(self._feed))

    # Training --------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Run transformers' train() without resume_from_checkpoint and trial.

        Args:
            resume_from_checkpoint: Refused: it would start at another position than the loader.
            trial: Refused: a hyperparameter search starts a job for each trial.
            **kwargs: As for transformers' train().

        Returns:
            The result of transformers' train(), a TrainOutput.

        Raises:
            ConfigError: resume_from_checkpoint or trial was given, or the configuration is not supported.
        """
        if resume_from_checkpoint:
            raise ConfigError(
                "train(resume_from_checkpoint=...) would start at another position than the loader: use "
                "`farandole run --checkpoint DIR`, or load the weights into the model before train()"
            )
        if trial is not None:
            raise ConfigError("hyperparameter_search() is not supported: start a job for each trial")
        return super().train(**kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole training as an elastic function; transformers' loop may begin several times in it."""
        epochs, *_, max_steps = self.set_initial_training_values(self.args, self._feed)
        self.create_optimizer()
        self.create_scheduler(max_steps)
        self._created_lr_scheduler = False  # else it would be recreated
        progress = _TrainerProgress(self)
        callbacks = self.callback_handler.callbacks
        callbacks[:] = [in_one_folder(each, self.args) for each in callbacks]
        tracking = [each for each in callbacks if isinstance(each, TrackerCallback | FolderCallback)]
        trackers: dict[str, Any] = {f"tracker_{index}": each.tracker for index, each in enumerate(tracking)}
        state: Any = TorchState(
            model=self.model,
            optimizer=self.optimizer,
            loader=self._feed.loader,
            scheduler=self.lr_scheduler,
            progress_of_trainer=progress,
            **trackers,
        )
        state.register_reset_callbacks([self._take_rank])
        loop = super()._inner_training_loop

        def enter(is_left: bool) -> Any:
            self._begin_at = self._feed.place[0] if is_left else epochs
            return loop(*args, **kwargs)

        result = self._feed.train(state, epochs, max_steps, enter, lambda: progress.is_stopped)
        # Not inside: a worker that is lost meanwhile would make the others regroup, with different models.
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._refuse_incomplete(self.state.best_model_checkpoint)
            super()._load_best_model()
        return result

    def _load_best_model(self) -> None:
        """Do nothing at the end of transformers' loop: see _inner_training_loop()."""

    def _loader_of(self, dataset: Any, global_batch_size: int) -> DataLoader:
        """Return a loader for a data set, as transformers' get_train_dataloader() would make it."""
        args, collator = self.args, self.data_collator
        if is_datasets_available() and isinstance(dataset, importlib.import_module("datasets").Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        return DataLoader(
            dataset,
            global_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            tail="drop" if args.dataloader_drop_last else "short",
            num_workers=args.dataloader_num_workers,
            collate_fn=collator,
        )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Set the training state to the current position, not to that of a checkpoint."""
        progress = _TrainerProgress(self)
        kept = progress.state_dict()
        super()._init_training_state(*args, **kwargs)
        progress.load_state_dict(kept)
        self.state.global_step = self._feed.place[2]
        return self._begin_at, 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run forward and backward, until the gradients of a global batch are complete."""
        one_step = super().training_step

        def compute(batch: Any) -> Any:
            items = num_items_in_batch if batch is inputs else self._get_num_items_in_batch([batch], self.args.device)
            if items is not None:
                weight(float(items))
            return one_step(model, batch, items)

        return self._feed.until_reduced(inputs, compute)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer as transformers does, and wrap it."""
        if self.optimizer is None:
            super().create_optimizer(*args, **kwargs)
        if not isinstance(self.optimizer, (WrappedOptimizer, AcceleratedOptimizer)):
            self._plain = self.optimizer
            # A scheduler checks that it has stepped; ours steps in its place (torch 2.13, torch/optim/lr_scheduler.py,
            # LRScheduler.step).
            self._plain._opt_called = True
            self.optimizer = DistributedOptimizer(self._plain)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        return self._feed

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._feed.loader.state_dict()["global_batch_size"])

    # Rank 0 writes and prints ----------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        return world.current().placement.rank == 0

    def is_local_process_zero(self) -> bool:
        return self.is_world_process_zero()

    def _take_rank(self) -> None:
        """Adapt to another rank. A new rank 0 writes the checkpoint in whose middle the former one was lost: the others
        have not gone beyond its step."""
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.is_world_process_zero()
        if self._newest_save is not None and self.is_world_process_zero():
            step, args, kwargs = self._newest_save
            if step == self.state.global_step and not self._is_complete(self._checkpoint_of(step)):
                super()._save_checkpoint(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as transformers does, on rank 0 only."""
        if self.is_world_process_zero():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        step = self.state.global_step
        self._newest_save = (step, args, kwargs)
        if self.is_world_process_zero():
            super()._save_checkpoint(*args, **kwargs)
        elif self.state.best_global_step == step:
            self.state.best_model_checkpoint = self._checkpoint_of(step)

    def _checkpoint_of(self, step: int) -> str:
        return os.path.join(self._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def _is_complete(self, checkpoint: str) -> bool:
        """Return whether a checkpoint has what transformers writes last."""
        return os.path.exists(os.path.join(checkpoint, TRAINER_STATE_NAME))

    def _refuse_incomplete(self, checkpoint: str) -> None:
        if not self._is_complete(checkpoint):
            raise ConfigError(
                f"load_best_model_at_end: {checkpoint} is not there, or not complete, on this host. The output_dir has "
                f"to be a folder that all hosts see; or load the best checkpoint after train()"
            )


class _TrainerProgress:
    """The state of the Trainer and its callbacks beside the counters, which follow from the loader."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def is_stopped(self) -> bool:
        return bool(self._trainer.control.should_training_stop)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": {name: getattr(self._trainer.state, name) for name in _BEST},
            "is_stopped": self.is_stopped,
            "callbacks": [dict(each.state()["attributes"]) for each in self._callbacks()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, value in saved["best"].items():
            setattr(self._trainer.state, name, value)
        self._trainer.control.should_training_stop = saved["is_stopped"]
        for callback, attributes in zip(self._callbacks(), saved["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class _EpochOfTheLoader(transformers.TrainerCallback):
    """Corrects the Trainer's epoch: it counts batches from its start, which may have been the middle of an epoch."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch, batches, _ = self._feed.place
        state.epoch = epoch + batches / len(self._feed)


def _refuse_data(
    loader: Any, dataset: Any, global_batch_size: int | None, args: transformers.TrainingArguments
) -> None:
    """Raise ConfigError unless there is either a loader, or a data set with the size of a global batch."""
    if loader is not None and (dataset is not None or global_batch_size is not None):
        raise ConfigError("Trainer: give either train_loader, or train_dataset and global_batch_size")
    if loader is None and dataset is None:
        raise ConfigError(
            "Trainer needs train_loader=fd.elastic.DataLoader(dataset, global_batch_size=..., collate_fn=...), or "
            "train_dataset and global_batch_size"
        )
    if loader is None and global_batch_size is None:
        raise ConfigError(
            f"Trainer(train_dataset=...) also needs global_batch_size=...: the number of samples of a step on all "
            f"workers together, since the number of workers may change. per_device_train_batch_size is "
            f"{args.per_device_train_batch_size}; with 4 workers transformers alone would make steps of "
            f"{4 * args.per_device_train_batch_size}"
        )


def _refuse(args: transformers.TrainingArguments) -> None:
    """Raise ConfigError for arguments that are not supported."""
    refused = [
        (args.gradient_accumulation_steps != 1, "gradient_accumulation_steps", "use DataLoader(micro_batch_size=...)"),
        (args.fp16, "fp16", "use bf16=True, which needs no scaling of the loss"),
        (args.auto_find_batch_size, "auto_find_batch_size", "use DataLoader(micro_batch_size=...)"),
        (bool(args.fsdp or args.deepspeed), "fsdp and deepspeed", "each worker has the whole model"),
        (args.parallel_mode == ParallelMode.DISTRIBUTED, "torch.distributed", "start it by `farandole run`"),
        (args.n_gpu > 0, "a GPU", "workers train on the CPU: use_cpu=True"),
    ]
    for is_given, name, instead in refused:
        if is_given:
            raise ConfigError(f"{name} is not supported by Farandole's Trainer: {instead}")
