"""A copy of what one optimizer's step changes, to take the step back. Made only where several things make one step:
several optimizers, or the methods of one that steps in two parts. A fault between them would leave the first one ahead.
"""

from __future__ import annotations

import torch

from farandole.state.deep_copy import deep_copy
from farandole.state.optimizer_state import OptimizerState


class Undo:
    """Parameters, optimizer state and the options of the groups, as they are now. Costs as much memory as they do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = OptimizerState("optimizer", optimizer)
        self.parameters = self._state.parameters
        self._values = [parameter.detach().clone() for parameter in self.parameters]
        saved = {"entries": self._state.entries(), "options": self._state.options()}
        self._saved = deep_copy(saved, "optimizer")

    def put_back(self) -> None:
        """Return to it. The same tensors stay in place."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self._values, strict=True):
                parameter.copy_(value)
        self._state.load(self._saved["entries"])
        self._state.load_options(self._saved["options"])

    def has_moved(self) -> bool:
        """Whether a parameter is another one now."""
        return not all(map(torch.equal, self.parameters, self._values))
