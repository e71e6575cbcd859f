"""A copy of what one optimizer's step changes, to take the step back. Made only where several optimizers make one step:
a fault between them would leave the first one ahead. StepState asks for it."""

from __future__ import annotations

from typing import Any

import torch

from farandole.state.parts import load_optimizer_entry


class Undo:
    """Parameters, optimizer state and the options of the groups, as they are now. Costs as much memory as they do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._values = [parameter.detach().clone() for parameter in self.parameters]
        self._entries = [_copy(optimizer.state[p]) if p in optimizer.state else None for p in self.parameters]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def put_back(self) -> None:
        """Return to it. The same tensors stay in place."""
        with torch.no_grad():
            for parameter, value, entry in zip(self.parameters, self._values, self._entries, strict=True):
                parameter.copy_(value)
                load_optimizer_entry(self._optimizer, parameter, entry)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)


def _copy(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if torch.is_tensor(value) else value for key, value in entry.items()}
