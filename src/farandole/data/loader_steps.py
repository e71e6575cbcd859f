"""The parts of a step that both loaders share: padding of a local batch, and detection of compiled bodies."""

from __future__ import annotations

import sys
from typing import Any

from farandole.errors import StepError
from farandole.state import step
from farandole.state.global_batch import Batch

_MOST = 10_000


class Padding:
    """The padding of a loader. `is_allowed`: the user accumulates; else a body without step() is an error."""

    def __init__(self, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self._data: Any = None
        self._count = 0

    def keep(self, data: Any) -> None:
        """Keep the batch that is handed out, to hand it out once more."""
        self._count = 0
        if self.is_allowed:
            self._data = data

    def is_due(self, batch: Batch | None) -> bool:
        """Return whether all gradients are reduced and the loop body has not stepped."""
        return self.is_allowed and batch is not None and batch.is_last and step.state() == "reduced"

    def next(self, batch: Batch | None) -> tuple[Batch, list[int], Any]:
        """Return a batch that does not count, its samples (none), and the last micro-batch's data again. Raises
        StepError when the body never steps."""
        assert batch is not None
        self._count += 1
        if self._count > _MOST:
            raise StepError(
                f"the loop body ran {_MOST} times since the gradients of samples [{batch.global_batch.start}, "
                f"{batch.global_batch.stop}) were reduced, and never called optimizer.step()"
            )
        padding = batch.padding()
        step.pad(padding)
        return padding, [], self._data


# Detection of torch.compile, for the loaders --------------------------------------------------------------------------


def has_compiled() -> bool:
    """Return whether torch.compile has compiled something in this process; False where this torch does not say so."""
    # No public API counts compiled graphs. The counters are those that torch's compile troubleshooting guide reads.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and bool(counters["stats"]["unique_graphs"])
