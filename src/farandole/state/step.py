"""The step that is open right now: loader, optimizer and run loop meet here. Main thread only.

    none ── open() ──► open ── reduced() ──► reduced ── decided() ──► decided
                         └───── aborted() ─────┴──────► aborted

The loader opens it with a batch, the optimizer reduces and applies, and whoever sees a fault aborts it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from farandole.state.ticket import Batch


class Phase(str, enum.Enum):
    NONE = "none"  # no batch was handed out
    OPEN = "open"  # a batch was handed out; its gradients are not reduced yet
    REDUCED = "reduced"  # every gradient of the global batch is here
    ABORTED = "aborted"  # a fault came first: the same global batch will be handed out again
    DECIDED = "decided"  # the optimizer step is applied (or skipped by all, as GradScaler does on inf)


@dataclass
class _OpenStep:
    phase: Phase = Phase.NONE
    batch: Batch | None = None
    on_decided: Callable[[Batch | None], None] | None = None


_step = _OpenStep()


def open(batch: Batch) -> None:
    """The loader hands out `batch`."""
    _step.phase, _step.batch = Phase.OPEN, batch


def close() -> None:
    """No batch is out any more: the loader has ended its epoch, or it was closed."""
    _step.phase, _step.batch = Phase.NONE, None


def state() -> str:
    """The name of the phase: "none", "open", "reduced", "aborted" or "decided"."""
    return _step.phase.value


def batch() -> Batch | None:
    """The batch that is out; None without a loader of ours."""
    return _step.batch


def is_undecided() -> bool:
    """Whether a batch is out whose step has not been applied."""
    return _step.phase in (Phase.OPEN, Phase.REDUCED, Phase.ABORTED)


def reduced() -> None:
    """Every gradient of the global batch has arrived on this rank."""
    _step.phase = Phase.REDUCED


def aborted() -> None:
    """The step in flight will not be applied; its gradients are dropped."""
    _step.phase = Phase.ABORTED


def decided() -> None:
    """The optimizer has stepped: everything else that belongs to the step happens now, or not at all."""
    if _step.on_decided is not None:
        _step.on_decided(_step.batch)
    if _step.phase is not Phase.NONE:
        _step.phase = Phase.DECIDED


def on_decided(callback: Callable[[Batch | None], None] | None) -> None:
    """Who moves counter, cursor and schedulers with the step (a TorchState); None takes it away."""
    _step.on_decided = callback
