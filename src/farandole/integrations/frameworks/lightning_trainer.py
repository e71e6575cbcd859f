"""A Trainer of Lightning whose fit() is elastic, with its fit loop and its strategy. Scripts use it in place of
lightning.Trainer.

It relies on Lightning's loops, which are not a public interface: pyproject.toml lists the tested versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from farandole.elastic import TorchState
from farandole.errors import ConfigError
from farandole.integrations.frameworks.feed import Feed
from farandole.integrations.frameworks.lightning_outputs import BarOfRankZero, TrackerLogger, tracked
from farandole.integrations.horovod.named.objects import broadcast_object
from farandole.training.collectives import world
from farandole.training.collectives.agreement import any as any_worker, mean
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.state.session import SESSION
from farandole.training.worker import context
from farandole.training.worker.context import device, local_rank

__all__ = ["FarandoleStrategy", "TrackerLogger", "Trainer"]

_OURS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "strategy": ("Farandole sets the strategy", ("auto",)),
    "devices": ("`farandole run -np N` sets the number of workers", ("auto", 1, "1")),
    "num_nodes": ("`farandole run` sets where workers run", (1,)),
    "accelerator": ('workers train on the CPU: accelerator="cpu"', ("cpu",)),
    "plugins": ("they would replace those of Farandole", (None, [])),
    "accumulate_grad_batches": ("use elastic.DataLoader(global_batch_size=..., micro_batch_size=...)", (1,)),
    "reload_dataloaders_every_n_epochs": ("the elastic.DataLoader lives as long as the job", (0,)),
    "overfit_batches": ("it would replace the elastic.DataLoader", (0,)),
    "fast_dev_run": ("use max_steps", (False,)),
    "use_distributed_sampler": ("the elastic.DataLoader divides the samples", (False,)),
    "sync_batchnorm": ("use farandole.SyncBatchNorm", (False,)),
}
"""Why an argument is refused, and its values that ask for what happens anyway: configuration files often have them."""


class Trainer(pl.Trainer):
    """A lightning.Trainer for `farandole run`: `fit(model, elastic.DataLoader(...))` continues when workers come and
    go.

    - A batch of Lightning's is a step: hooks, global_step and schedulers see each one once, however often it was
      repeated, and however many micro-batches it has.
    - The module, the optimizer, schedulers, the state_dict() of callbacks and the decision to stop are the same on all
      workers after each change. All other values of the module or a callback are each worker's own.
    - Every worker runs a validation, on the batches of its loader: with torch's DataLoader on all samples, alike.
    - `self.log(..., sync_dist=True)` gives the mean of the workers' values. When a worker is lost in it, or in another
      collective of the module's, the step is repeated; after the last batch of an epoch, hooks that were not called
      yet are skipped.
    - Rank 0 writes checkpoints and logs. When workers are lost, another worker may become rank 0 and does so. A
      TensorBoardLogger then continues in the same folder, with each point once; for other loggers see TrackerLogger.
    - A worker that joins sees on_train_start, and no on_train_epoch_start of an epoch in which it joins; so does, now
      and then, a survivor of a fault.

    Args:
        max_epochs: Number of epochs; this or `max_steps` is needed, so that all workers end together.
        max_steps: Number of steps; -1: as many as the epochs have.
        **kwargs: Further arguments of lightning.Trainer.

    Raises:
        ConfigError: An unsupported feature is used: several optimizers or manual optimization, `dataloader_iter`,
            ckpt_path= (`farandole run --checkpoint`), another loader, a `precision` other than "32-true", "bf16-mixed"
            and "64-true", and the arguments in _OURS, unless they ask for what happens anyway.
        NotInitialized: init() was not called before.

    Examples:
        ```python
        from farandole.frameworks.lightning import Trainer

        trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(module, fd.elastic.DataLoader(dataset, global_batch_size=16))
        ```
    """

    fit_loop: Any

    def __init__(self, *, max_epochs: int | None = None, max_steps: int = -1, **kwargs: Any) -> None:
        for name, (instead, _) in _OURS.items():
            if name in kwargs and not _is_as_it_is(name, kwargs[name]):
                raise ConfigError(f"Trainer({name}={kwargs[name]!r}) is not supported by Farandole: {instead}")
        if max_epochs is None and max_steps < 0:
            raise ConfigError("Trainer needs max_epochs or max_steps, so that all workers end together")
        world.current()  # NotInitialized here is clearer than later
        precision = _precision(kwargs.pop("precision", None))
        kwargs = {name: value for name, value in kwargs.items() if name not in _OURS}
        super().__init__(
            max_epochs=max_epochs,
            max_steps=max_steps,
            strategy=FarandoleStrategy(),
            accelerator="cpu",
            devices=1,
            use_distributed_sampler=False,
            plugins=[precision],
            **kwargs,
        )
        self.fit_loop = ElasticFitLoop.like(self.fit_loop)
        self.callbacks.append(self.fit_loop.bar)  # behind Lightning's own

    def fit(self, *args: Any, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Run Lightning's fit() without ckpt_path.

        Args:
            *args: As for Lightning's fit(): the module, the loader for training, those for validation.
            ckpt_path: Refused: it would start at another position than the loader.
            **kwargs: As for Lightning's fit().

        Raises:
            ConfigError: ckpt_path was given, or the configuration of the Trainer is not supported.
        """
        if ckpt_path is not None:
            raise ConfigError(
                "fit(ckpt_path=...) would start at another position than the loader: use `farandole run --checkpoint "
                "DIR`, or load the weights into the model before fit()"
            )
        super().fit(*args, **kwargs)


def _is_as_it_is(name: str, value: Any) -> bool:
    if name == "accelerator" and value == "auto":
        return not torch.accelerator.is_available()  # with a device, Lightning would take it
    return value in _OURS[name][1]


class _StepWithoutClosure(Precision):
    """Runs forward and backward before the optimizer's step, not inside it: they may have to be repeated."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result


class _Bfloat16(_StepWithoutClosure, MixedPrecision):
    """Computes with bfloat16; parameters and gradients have 32 bits."""

    def __init__(self) -> None:
        MixedPrecision.__init__(self, "bf16-mixed", "cpu")

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip as without a scaler: MixedPrecision refuses optimizers that support one, as DistributedOptimizer does
        (Lightning 2.6, MixedPrecision.clip_gradients)."""
        Precision.clip_gradients(self, *args, **kwargs)


class _Float64(_StepWithoutClosure, DoublePrecision):
    """Computes with float64."""


def _precision(given: Any) -> Precision:
    """Return the plugin for an argument `precision`. Raises ConfigError for one that is not supported."""
    for plugin, names in (
        (_StepWithoutClosure, ("None", "32", "32-true")),
        (_Bfloat16, ("bf16-mixed", "bf16")),
        (_Float64, ("64", "64-true")),
    ):
        if str(given) in names:
            return plugin()
    raise ConfigError(
        f'Trainer(precision={given!r}) is not supported by Farandole: use "bf16-mixed", which needs no scaling of the '
        f'loss, "32-true" or "64-true"'
    )


# Lightning's fit loop inside an elastic function: it begins at the current position -----------------------------------


class ElasticFitLoop(_FitLoop):
    """A fit loop whose counters follow from the loader and the step counter of the state, whenever it begins."""

    bar: BarOfRankZero

    @classmethod
    def like(cls, loop: _FitLoop) -> ElasticFitLoop:
        """Return an elastic loop in place of a Trainer's own."""
        ours = cls(loop.trainer, loop.min_epochs, loop.max_epochs)
        ours.epoch_loop, ours.bar = loop.epoch_loop, BarOfRankZero()
        return ours

    def run(self) -> None:
        """Run the whole training as an elastic function."""
        trainer, strategy = self.trainer, self.trainer.strategy
        # Now, outside the elastic function: Lightning counts all workers' batches when it first sees a loader.
        self.setup_data()
        feed = self._feed()
        if self.epoch_loop._should_check_val_epoch():
            trainer.validating = True
            self.epoch_loop.val_loop.setup_data()
            trainer.training = True
        schedulers = {f"scheduler_{i}": each.scheduler for i, each in enumerate(trainer.lr_scheduler_configs)}
        with tracked(trainer.loggers) as trackers:
            values: dict[str, Any] = {f"tracker_{i}": each for i, each in enumerate(trackers)}
            state: Any = TorchState(
                model=trainer.lightning_module,
                optimizer=strategy.optimizers[0],
                loader=feed.loader,
                callbacks=_Callbacks(trainer),
                **schedulers,
                **values,
            )
            self._train(feed, state)

    def _train(self, feed: Feed, state: Any) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        state.register_reset_callbacks([strategy.take_rank, lambda: self.bar.take_rank(trainer)])
        strategy.feed = feed
        epochs = self.max_epochs if self.max_epochs is not None and self.max_epochs >= 0 else 2**31
        steps = trainer.estimated_stepping_batches
        try:
            feed.train(
                state, epochs, steps, lambda is_left: self._enter(feed, is_left), lambda: bool(trainer.should_stop)
            )
        finally:
            strategy.feed = None

    def setup_data(self) -> None:
        """Prepare the training loader. `estimated_stepping_batches` in configure_optimizers() calls it before run()
        does, and Lightning keeps the first loader that it sees, so the feed has to be in place here."""
        self._feed()
        super().setup_data()

    def _feed(self) -> Feed:
        """Return the feed, made of the loader that was given to fit(), and put into its place."""
        if is_param_in_hook_signature(self.trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
            raise ConfigError("training_step(dataloader_iter) is not supported: take a batch")
        source = self._data_source
        loader = source.dataloader()
        feed = loader if isinstance(loader, Feed) else Feed(loader)
        source.instance, source.name = feed, ""
        return feed

    def _enter(self, feed: Feed, is_left: bool) -> None:
        if not is_left:
            return
        self.trainer.training = True  # an error may have left it in validation
        self.trainer.strategy.take_rank()
        iter(self._data_fetcher)
        self._begin_at(*feed.place)
        super().run()

    def _begin_at(self, epoch: int, batches: int, steps: int) -> None:
        """Set Lightning's counters to this position."""
        is_inside = batches > 0
        progress = self.epoch_loop.batch_progress
        optimizer = self.epoch_loop.automatic_optimization.optim_progress.optimizer
        for tracker in (self.epoch_progress.current, self.epoch_progress.total):
            _count(tracker, epoch + is_inside, epoch)
        for counted, batch, step in ((progress, batches, steps), (optimizer.step, batches, steps)):
            _count(counted.current, batch, batch)
            _count(counted.total, step, step)
        progress.is_last_batch = False
        self.epoch_loop._batches_that_stepped = steps
        _Loop.restarting.fset(self, is_inside)  # Lightning's own setter adds to it


class _Callbacks:
    """The state of Lightning's callbacks, and whether one of them requests a stop: the same on all workers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        states = {each.state_key: each.state_dict() for each in self._trainer.callbacks}
        return {"should_stop": self._trainer.should_stop, "states": {key: each for key, each in states.items() if each}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._trainer.should_stop = saved["should_stop"]
        for each in self._trainer.callbacks:
            if each.state_key in saved["states"]:
                each.load_state_dict(saved["states"][each.state_key])


def _count(tracker: Any, begun: int, done: int) -> None:
    """Set the counts of a tracker, which has two to four of these."""
    for name, number in (("ready", begun), ("started", begun), ("processed", done), ("completed", done)):
        if hasattr(tracker, name):
            setattr(tracker, name, number)


# Lightning's strategy for a worker of Farandole: one device, our optimizer, our ranks ---------------------------------


class FarandoleStrategy(Strategy):
    """A strategy whose gradients are reduced by DistributedOptimizer. Inside fit() only explicit requests are
    collectives: metrics with sync_dist=True, and the decision to stop. Barriers and broadcasts, which guard files in
    Lightning, are not: rank 0 alone writes files.

    See the example of `Trainer`.
    """

    optimizers: Any
    strategy_name = "farandole"
    is_distributed = True  # else Lightning skips sync_dist

    def __init__(self) -> None:
        super().__init__()
        self.feed: Feed | None = None  # during training
        self._repeated: list[Any] = []  # the batch in place of Lightning's, if there is one
        self.take_rank()

    def take_rank(self) -> None:
        """Copy the rank to the global variables with which Lightning decides which process may print and write."""
        rank_zero_only.rank = fabric_rank_zero_only.rank = 0 if self.is_global_zero else max(1, self.global_rank)

    # Placement -------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        return world.current().placement.rank

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def world_size(self) -> int:
        return world.current().placement.size

    @property
    def is_global_zero(self) -> bool:
        job = context.job()
        is_outside = job is not None and job.is_newcomer()  # its world is itself alone, until it joins
        return self.global_rank == 0 and not is_outside

    @property
    def root_device(self) -> torch.device:
        return device()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # The step --------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up the optimizer as Lightning does, and wrap it."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if len(self.optimizers) != 1 or not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} has {len(self.optimizers)} optimizers, automatic_optimization="
                f"{module.automatic_optimization}; Farandole's Trainer needs one optimizer and automatic optimization"
            )
        plain = self.optimizers[0]
        # Schedulers check that it has stepped; ours steps in its place (torch 2.13, torch/optim/lr_scheduler.py,
        # LRScheduler.step).
        plain._opt_called = True
        self.optimizers = [DistributedOptimizer(plain)]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run forward and backward until the gradients of a global batch are complete; then the step."""
        assert self.feed is not None
        first = object()

        def compute(batch: Any) -> Any:
            self._repeated = [] if batch is first else [self._on_device(batch)]
            return closure()

        until_reduced = partial(self.feed.until_reduced, first, compute)
        return super().optimizer_step(optimizer, until_reduced, model, **kwargs)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self._repeated[0] if self._repeated else batch
        return super().training_step(batch, *args, **kwargs)

    def _on_device(self, batch: Any) -> Any:
        """Return a batch after Lightning's transfer of a fetched batch."""
        batch = self.precision_plugin.convert_input(batch)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, dataloader_idx=0)

    # Collectives -----------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of all workers' values; float64 for whole numbers."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op or "mean").lower()
        if name not in ("mean", "avg", "sum"):
            raise ConfigError(f"metrics are reduced by mean or sum, got {reduce_op!r}")
        reduced = mean(tensor)
        return reduced * self.world_size if name == "sum" else reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers decide so; or any."""
        return not any_worker(not decision) if all else any_worker(decision)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Raise ConfigError: not supported, since the use of the result would depend on the number of workers."""
        raise ConfigError("all_gather() of a LightningModule is not supported; use farandole.allgather()")

    def barrier(self, name: str | None = None) -> None:
        pass

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast the names of files before training; inside fit() return each worker's own object."""
        return obj if SESSION.is_elastic or self.world_size == 1 else broadcast_object(obj, src)
