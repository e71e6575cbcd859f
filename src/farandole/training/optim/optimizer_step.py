"""The step of an optimizer whose gradients come along one path, or along several, one for each module in
DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farandole.errors import StepError
from farandole.training.optim.optimizer_mixin import call_dropped, protect, refuse_closure
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.step import StepStatus

if TYPE_CHECKING:
    from farandole.training.optim.loader_path import LoaderPath


def step_along(
    paths: Sequence[LoaderPath],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    apply: Callable[..., Any],
    closure: Callable[[], float] | None,
) -> Any:
    """Apply the reduced gradients of the paths by `apply`. True: applied by all workers. False: not applied. With a
    closure, its loss."""
    _refuse_untracked(optimizer)
    for path in paths:
        path.notice(batch)
    if closure is not None:
        return _step_with(closure, paths, optimizer, batch, apply)
    if not batch.is_last:
        step.facts().has_early_step = True
        for path in paths:
            path.end_body(batch)
        return False
    for path in paths:
        path.reduce_rest(batch)
    step.begin_applying(optimizer)
    if step.is_aborted():
        return False
    for path in paths:
        path.refuse_second_step()
        path.refuse_unplanned()
    if step.awaits_others(optimizer):
        protect(optimizer)
    for path in paths:
        path.applied()
    apply(gradients=[each for path in paths for each in path.tensors()])
    step.mark_stepped(optimizer)
    return True


def _step_with(
    closure: Callable[[], Any],
    paths: Sequence[LoaderPath],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    apply: Callable[..., Any],
) -> Any:
    """Step with a closure. The optimizer runs backward passes itself, each of which reduces; it may change parameters
    between them."""
    refuse_closure(batch)
    if step.is_aborted():
        return call_dropped(closure)
    for path in paths:
        path.refuse_unplanned()
    step.begin_applying(optimizer)
    protect(optimizer)
    loss = apply(closure)
    if not step.is_aborted():
        decide_along(paths, optimizer, batch)
    return loss


def decide_along(paths: Sequence[LoaderPath], optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Decide a step whose reduced gradients the optimizer has applied by itself. Raises StepError if they were not."""
    _refuse_untracked(optimizer)
    for path in paths:
        path.notice(batch)
        path.refuse_second_step()
    if step.status() is not StepStatus.REDUCED:
        raise StepError(
            f"{type(optimizer).__name__} has stepped without the gradients of the global batch: each loop body "
            f"needs a backward pass between zero_grad() and the step"
        )
    for path in paths:
        path.refuse_unplanned()
        path.applied()
    step.mark_stepped(optimizer)


def _refuse_untracked(optimizer: torch.optim.Optimizer) -> None:
    if not step.is_tracked(optimizer):
        raise StepError(
            "optimizer.step() of an optimizer that belongs to no TorchState, within the loop over a DataLoader of "
            "Farandole, whose steps all workers decide: pass it to the state, TorchState(..., NAME=optimizer), or "
            "call its step() outside of the loop"
        )
