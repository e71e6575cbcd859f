"""Optimizers that cannot train with a loader of Farandole: they are refused when a state is created with them."""

from __future__ import annotations

import torch

from farandole.errors import ConfigError
from farandole.training.state.optimizer_state import with_inner

_WHY_REFUSED = {
    torch.optim.LBFGS: (
        "evaluates its closure as often as the loss on this worker's local batch requires, so that workers would run "
        "different numbers of reductions"
    ),
    torch.optim.SparseAdam: (
        "needs sparse gradients, and those of the global batch are dense; use torch.optim.Adam for them"
    ),
}


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot train with a loader of Farandole, or that contains one."""
    for each in with_inner("optimizer", optimizer).values():
        if each is not optimizer and hasattr(each, "abandon_step"):
            raise ConfigError(
                f"the {type(optimizer).__name__} of the TorchState contains a DistributedOptimizer, and would step "
                f"even when the step is skipped: wrap the outermost optimizer in DistributedOptimizer(...)"
            )
        for kind, why in _WHY_REFUSED.items():
            if isinstance(each, kind):
                raise ConfigError(
                    f"torch.optim.{kind.__name__} {why}. Use another optimizer, or train without a DataLoader of "
                    f"Farandole, under the commit rule"
                )
