"""Lightning's fit loop inside an elastic function: it begins at the current position. The Trainer uses it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from farandole.elastic import TorchState
from farandole.errors import ConfigError
from farandole.frameworks.feed import Feed


class ElasticFitLoop(_FitLoop):
    """A fit loop whose counters follow from the loader and the step counter of the state, whenever it begins."""

    @classmethod
    def like(cls, loop: _FitLoop) -> ElasticFitLoop:
        """Return an elastic loop in place of a Trainer's own."""
        ours = cls(loop.trainer, loop.min_epochs, loop.max_epochs)
        ours.epoch_loop = loop.epoch_loop
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
        state: Any = TorchState(
            model=trainer.lightning_module,
            optimizer=strategy.optimizers[0],
            loader=feed.loader,
            callbacks=_Callbacks(trainer),
            **schedulers,
        )
        state.register_reset_callbacks([strategy.take_rank])
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
