"""Who takes part in the current step of step.py: optimizers, what they can undo, and the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from farandole.training.state.batch import Batch


class Undoable(Protocol):
    """A copy of the values that an optimizer can change (`Undo` in optim/optimizer_mixin.py)."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Parameters that put_back() restores."""
        ...

    def put_back(self) -> None:
        """Restore the copied values."""
        ...


class Participant(Protocol):
    """An optimizer's part in the open step (optim/loader_path.py)."""

    def begin_micro_batch(self) -> None:
        """Note that the next micro-batch is handed out."""
        ...

    def begin_padding(self) -> None:
        """Keep the gradients that are reduced so far: loop bodies follow whose gradients do not count."""
        ...

    def end_overlap(self, reason: str) -> None:
        """Complete or drop all transfers to other ranks, since the step ends."""
        ...


class Observer:
    """Watches the tensors that user code may change before a step is decided. This one watches none: there is no state.
    `StepState` in state/step_state.py is another one."""

    def pass_ended(self, batch: Batch) -> None:
        """Note, in strict mode, that a backward pass of the batch has ended, and counts."""

    def name_of(self, item: torch.Tensor | torch.nn.Module) -> str:
        """Return the name of a parameter or of a layer, with that of its model."""
        return type(item).__name__

    def combine_shards(self, batch: Batch) -> None:
        """Combine, in strict mode, what forward passes have changed in each shard. All ranks call it, before the
        gradients are reduced. Raises the errors of transports."""

    def digest_of_statistics(self, shard: int) -> int:
        """Return a digest of the running statistics that a shard of this global batch has left; 0 without any."""
        return 0

    def before_applying(self) -> None:
        """Note that the step's first optimizer is about to apply its gradients, or would if it was not aborted."""

    def keeps_scaler(self) -> bool:
        """Return whether there is a GradScaler in the state, where there is a state."""
        return True

    def aborted(self) -> None:
        """Note that the step is aborted; the rest of the loop body still runs."""

    def trust(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that the step of an optimizer was undone: these parameters are as they were before it."""


NO_OBSERVER = Observer()
