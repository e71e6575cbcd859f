"""Optimizers that cannot train with a loader of Farandole, and their refusal when a state is created with them."""

from __future__ import annotations

import torch

from farandole.errors import ConfigError
from farandole.state.optimizer_state import with_inner

_WHY = {
    torch.optim.LBFGS: (
        "evaluates its closure as often as the loss on this worker's local batch asks for, so that workers would come "
        "to "
        "different numbers of reductions"
    ),
    torch.optim.SparseAdam: (
        "takes sparse gradients only, and those of the global batch are dense; torch.optim.Adam takes them"
    ),
}


def refuse_for_loader(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot train with a loader of Farandole, or that contains one."""
    for each in with_inner("optimizer", optimizer).values():
        if each is not optimizer and hasattr(each, "abandon_step"):
            raise ConfigError(
                f"there is a DistributedOptimizer inside of the {type(optimizer).__name__} of the TorchState, which "
                f"would step whether or not its step is applied: DistributedOptimizer(...) belongs around all of it"
            )
        for kind, why in _WHY.items():
            if isinstance(each, kind):
                raise ConfigError(
                    f"torch.optim.{kind.__name__} {why}. Use another optimizer, or train without a DataLoader of "
                    f"Farandole, under the commit rule"
                )
