"""A copy of the values that one optimizer's step changes, to undo the step. It is made only where several parts form
one step: several optimizers, or the methods of an optimizer that steps in two parts. A fault between them would leave
the first one ahead."""

from __future__ import annotations

import torch

from farandole.state.deep_copy import deep_copy
from farandole.state.optimizer_state import OptimizerState


class Undo:
    """A copy of parameters, optimizer state and group options. Needs as much memory as they do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = OptimizerState("optimizer", optimizer)
        self.parameters = self._state.parameters
        self._values = [parameter.detach().clone() for parameter in self.parameters]
        saved = {"entries": self._state.entries(), "options": self._state.options()}
        self._saved = deep_copy(saved, "optimizer")

    def put_back(self) -> None:
        """Restore the copied values. The same tensors stay in place."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self._values, strict=True):
                parameter.copy_(value)
        self._state.load(self._saved["entries"])
        self._state.load_options(self._saved["options"])

    def has_moved(self) -> bool:
        """Return whether a parameter has changed since."""
        return not all(map(torch.equal, self.parameters, self._values))
