"""DistributedDataParallel in strict mode: it only computes. Its reducer would add up the gradients of several shards
before anyone sees them, so those of each shard go the way of a DistributedOptimizer (optim/loader_path.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import ConfigError
from farandole.integrations.ddp.comm_hook import registered_hook
from farandole.integrations.ddp.module import parallel_modules, refuse_configuration
from farandole.training.optim.distributed_optimizer import reduce_in_place
from farandole.training.optim.optimizer_mixin import WrappedOptimizer


class ShardModule(DistributedDataParallel):
    """The mixin of such a module. adopt_for_shards() puts it before the user's class."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        asked = self.require_backward_grad_sync
        # As in no_sync(), and without a broadcast of buffers (torch 2.13, torch/nn/parallel/distributed.py,
        # DistributedDataParallel._pre_forward).
        self.require_backward_grad_sync = self.require_forward_param_sync = False
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_backward_grad_sync = asked

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Raise ConfigError: nothing is communicated here."""
        _refuse_hook()


def adopt_for_shards(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], accumulates: Callable[[], bool]
) -> bool:
    """Make each DistributedDataParallel among the modules, or inside them, compute only, and the optimizers reduce what
    it has computed. Returns whether there is one. A second call for the same objects changes nothing. `accumulates` is
    that of adopt(), and not needed here. Raises ConfigError for an object for which that is not possible."""
    found = parallel_modules(modules)
    for each in found:
        if isinstance(each, ShardModule):
            continue
        refuse_configuration(each)
        if registered_hook(each) is not None:
            _refuse_hook()
        base = type(each)
        each.__class__ = type(base.__name__, (ShardModule, base), {"__module__": base.__module__})
    keys = {id(parameter) for each in found for parameter in each.parameters()}
    for optimizer in optimizers if found else ():
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not (isinstance(optimizer, WrappedOptimizer) or keys.isdisjoint(owned)):
            reduce_in_place(optimizer)
    return bool(found)


def _refuse_hook() -> None:
    raise ConfigError(
        "strict mode adds up gradients in an order of its own, and a communication hook of DistributedDataParallel in "
        "another one: leave register_comm_hook() out"
    )
