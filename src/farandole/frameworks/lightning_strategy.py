"""Lightning's strategy for a worker of Farandole: one device, our optimizer, our ranks. The Trainer uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from farandole.collectives import world
from farandole.collectives.agreement import any as any_worker
from farandole.collectives.agreement import mean
from farandole.collectives.named.objects import broadcast_object
from farandole.errors import ConfigError
from farandole.optim.distributed_optimizer import DistributedOptimizer
from farandole.state import loop_hooks
from farandole.worker.context import device, local_rank

if TYPE_CHECKING:
    from farandole.frameworks.feed import Feed


class FarandoleStrategy(Strategy):
    """A strategy whose gradients are reduced by DistributedOptimizer. Inside fit() only explicit requests are
    collectives: metrics with sync_dist=True, and the decision to stop. Barriers and broadcasts, which guard files in
    Lightning, are not: rank 0 alone writes files."""

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
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

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
        return self.global_rank == 0

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
                f"{module.automatic_optimization}; Farandole's Trainer takes one optimizer and automatic optimization"
            )
        plain = self.optimizers[0]
        plain._opt_called = True  # schedulers check that it has stepped; ours steps in its place
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
        return obj if loop_hooks.is_elastic() or self.world_size == 1 else broadcast_object(obj, src)
