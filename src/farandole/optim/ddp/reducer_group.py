"""The process group that the reducer inside a DistributedDataParallel uses. module.py creates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from farandole.errors import RecoverableError
from farandole.optim.step_agreement import absorb
from farandole.process_group.c10d_group import FarandoleGroup
from farandole.process_group.c10d_members import Everybody
from farandole.process_group.works import Done
from farandole.state import step


class ReducerGroup(FarandoleGroup):
    """A group of all workers. The reducer itself reduces only one tensor: the parameters that were used
    (find_unused_parameters).

    A fault in it must not pass through the reducer's C++, which would be left in the middle of a pass. It aborts the
    step, and the pass runs to its end without effect.

    used_before  places of the parameters that earlier micro-batches have used, unknown to the reducer
    """

    def __init__(self, used_before: Callable[[], Sequence[int]]) -> None:
        super().__init__(Everybody())
        self._used_before = used_before

    def allreduce(
        self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = ReduceOp.SUM, timeout: Any = None
    ) -> Done:
        """Reduce the one tensor of `tensors`: a number for each parameter, 0 if it was not used."""
        if step.state() == "aborted":
            return Done()
        for place in self._used_before():
            tensors[0][place] = 1
        try:
            return super().allreduce(tensors, opts, timeout)
        except RecoverableError:
            if not absorb():
                raise
            return Done()
