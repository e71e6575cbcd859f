"""A Trainer of Lightning whose fit() is elastic. Scripts use it in place of lightning.Trainer.

It relies on Lightning's loops, which are not a public interface: pyproject.toml lists the tested versions.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from farandole.collectives import world
from farandole.errors import ConfigError
from farandole.frameworks.lightning_loop import ElasticFitLoop
from farandole.frameworks.lightning_strategy import FarandoleStrategy

__all__ = ["FarandoleStrategy", "Trainer"]

_OURS = {
    "strategy": "it is Farandole's",
    "devices": "`farandole run -np N` says how many workers there are",
    "num_nodes": "`farandole run` says where workers run",
    "accelerator": "workers train on the CPU",
    "precision": "32-bit precision is what was tested; a model may be made of float64",
    "plugins": "they would take the place of Farandole's",
    "accumulate_grad_batches": "use elastic.DataLoader(global_batch_size=..., micro_batch_size=...)",
    "reload_dataloaders_every_n_epochs": "the elastic.DataLoader lives as long as the job",
    "overfit_batches": "it would exchange the elastic.DataLoader",
    "fast_dev_run": "use max_steps",
    "use_distributed_sampler": "the elastic.DataLoader divides the samples",
    "sync_batchnorm": "use farandole.SyncBatchNorm",
}


class Trainer(pl.Trainer):
    """A lightning.Trainer for `farandole run`: `fit(model, elastic.DataLoader(...))` continues when workers come and
    go.

        fd.init()
        trainer = farandole.frameworks.lightning.Trainer(max_epochs=5)
        trainer.fit(module, fd.elastic.DataLoader(dataset, global_batch_size=64), validation_loader)

    - A batch of Lightning's is a step: hooks, global_step and schedulers see each one once, however often it was
      repeated, and however many micro-batches it has.
    - The module, the optimizer, schedulers, the state_dict() of callbacks and the decision to stop are the same on all
      workers after each change. All other values of the module or a callback are each worker's own.
    - Every worker runs a validation, on the batches of its loader: with torch's DataLoader on all samples, alike.
    - `self.log(..., sync_dist=True)` gives the mean of the workers' values. When a worker is lost in it, or in another
      collective of the module's, the step is repeated; after the last batch of an epoch, hooks that were not called
      yet are skipped.
    - Rank 0 writes checkpoints and logs. When workers are lost, another worker may become rank 0 and does so.
    - A worker that joins sees on_train_start, and no on_train_epoch_start of an epoch in which it joins; so does, now
      and then, a survivor of a fault.

    Raises:
        ConfigError: An unsupported feature is used: several optimizers or manual optimization, `dataloader_iter`,
            ckpt_path= (`farandole run --checkpoint`), another loader, and the arguments in _OURS.
        NotInitialized: init() was not called before.
    """

    fit_loop: Any

    def __init__(self, *, max_epochs: int | None = None, max_steps: int = -1, **kwargs: Any) -> None:
        for name, instead in _OURS.items():
            if name in kwargs:
                raise ConfigError(f"Trainer({name}={kwargs[name]!r}) is not supported by Farandole: {instead}")
        if max_epochs is None and max_steps < 0:
            raise ConfigError("Trainer needs max_epochs or max_steps, at which all workers end")
        world.current()  # NotInitialized here is clearer than later
        super().__init__(
            max_epochs=max_epochs,
            max_steps=max_steps,
            strategy=FarandoleStrategy(),
            accelerator="cpu",
            devices=1,
            use_distributed_sampler=False,
            plugins=[_StepWithoutClosure()],
            **kwargs,
        )
        self.fit_loop = ElasticFitLoop.like(self.fit_loop)

    def fit(self, *args: Any, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Run Lightning's fit() without ckpt_path."""
        if ckpt_path is not None:
            raise ConfigError(
                "fit(ckpt_path=...) would begin elsewhere than the loader: use `farandole run --checkpoint DIR`, or "
                "load the weights into the model before fit()"
            )
        super().fit(*args, **kwargs)


class _StepWithoutClosure(Precision):
    """Runs forward and backward before the optimizer's step, not inside it: they may have to be repeated."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result
