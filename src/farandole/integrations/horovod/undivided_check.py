"""A comparison of all workers: does each of them train on all of the data?"""

from __future__ import annotations

import torch

from farandole.integrations.horovod.named.calls import Reduced
from farandole.integrations.horovod.named.negotiation import Average, Sum
from farandole.training.collectives import world
from farandole.training.collectives.extension import are_all
from farandole.training.optim.options import Options
from farandole.training.state.undivided_data import UndividedData

_AT = 3
"""The reduction with which the workers compare: by then the loops of the training run."""

_FIRST_GENERATION = 1
"""Only its workers have all reduced equally often."""


class UndividedCheck:
    """Of one optimizer. The reductions of its first parameter are counted, as all workers have equally many."""

    def __init__(self, options: Options) -> None:
        self._may_compare = options.op in (Average, Sum) and are_all(options.process_set)
        self._divisor = 1 if options.op == Average else None
        self._reductions = 0
        self._data: UndividedData | None = None
        self._sum = torch.zeros(1, dtype=torch.float64, device="cpu")

    def begin(self, name: str) -> Reduced | None:
        """Return what is reduced with the gradients of this reduction; None in most. `name` is that of the first
        parameter."""
        here = world.current()
        if not self._may_compare or here.placement.size == 1:
            return None
        self._reductions += 1
        if self._reductions != _AT or here.id.number != _FIRST_GENERATION:
            return None
        self._data = UndividedData()
        self._sum.fill_(float(self._data.hash))
        return Reduced(f"data.{name}", [self._sum])

    def end(self) -> None:
        """Add a remark to the last line of the job if all workers have the same undivided data."""
        data, self._data = self._data, None
        if data:
            mean = self._sum.item() / (self._divisor or world.current().placement.size)
            if abs(mean / data.hash - 1) < 1e-9:
                world.remark("undivided data", data.text())
