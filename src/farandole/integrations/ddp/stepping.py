"""Optimizers of torch for parameters that a DistributedDataParallel reduces: they decide steps, as a
DistributedOptimizer does. module.py converts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.errors import ConfigError, StepError
from farandole.integrations.ddp.ddp_path import DdpPath
from farandole.training.optim.optimizer_mixin import (
    STEPPED_TWICE,
    OwnMethods,
    as_schedulers_patch_it,
    call_dropped,
    closure_of,
    overriding_methods,
    protect,
    refuse_closure,
    zeroing,
)
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.step import StepStatus

_OF_THEIR_OWN = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # by name: their import is slow


class SteppingOptimizer(OwnMethods):
    """The mixin of such an optimizer. make_stepping() puts it before the user's class."""

    farandole_attributes = OwnMethods.farandole_attributes | {
        "_farandole_paths",
        "_farandole_reduced",
        "_farandole_global_batch",
    }

    _farandole_paths: Sequence[DdpPath]
    _farandole_reduced: frozenset[int]  # parameters, by id
    _farandole_global_batch: GlobalBatch | None  # the global batch that was applied last

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does. With a batch of a DataLoader of Farandole it returns True if all workers have applied the
        step. False: a worker was lost and the same batch comes again, or further micro-batches follow."""
        closure, apply = closure_of(self, closure, args, kwargs)
        batch = step.batch()
        if batch is None:
            loss = apply(gradients=self._gradients()) if closure is None else apply(closure)
            step.mark_stepped(self)
            return loss
        if closure is not None:
            return self._step_with(closure, batch, apply)
        are_reduced = self._begin_step(batch)
        if not batch.is_last:
            step.note_early_step()
            return False
        step.begin_applying(self)
        if step.is_aborted():
            return False
        self._refuse_local_gradients(are_reduced)
        if step.awaits_others(self):
            protect(self)
        apply(gradients=self._gradients())
        self._end_step(batch)
        return True

    def _step_with(self, closure: Callable[[], Any], batch: Batch, apply: Callable[..., Any]) -> Any:
        """Step with a closure. The optimizer runs backward passes itself; it may change parameters between them."""
        refuse_closure(batch)
        if step.is_aborted():
            return call_dropped(closure)
        step.begin_applying(self)
        protect(self)
        loss = apply(closure)
        if not step.is_aborted():
            self._decide_within(batch)
        return loss

    def _decide_within(self, batch: Batch) -> None:
        self._begin_step(batch)
        self._refuse_local_gradients(step.status() is StepStatus.REDUCED)
        self._end_step(batch)

    def _begin_step(self, batch: Batch) -> bool:
        """Begin a step. Returns whether the gradients are those of the global batch."""
        if self._farandole_global_batch is batch.global_batch:
            raise StepError(STEPPED_TWICE)
        keys = self._keys()
        are_reduced = [path.begin_step(batch, keys) for path in self._farandole_paths]
        return all(are_reduced)

    def _end_step(self, batch: Batch) -> None:
        self._farandole_global_batch = batch.global_batch
        for path in self._farandole_paths:
            path.stepped(self._keys())
        step.mark_stepped(self)

    # torch wraps step() of every optimizer class with a profiler range and hooks; the base class's step() is wrapped
    # already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as torch does, except while the micro-batches of a global batch are being accumulated."""
        batch = step.batch()
        if batch is not None and step.is_undecided() and self._farandole_global_batch is not batch.global_batch:
            keys = self._keys()
            may_zero = [path.begin_zeroing(batch, keys) for path in self._farandole_paths]
            if not all(may_zero):
                return
        super().zero_grad(**zeroing(set_to_none))

    def abandon_step(self) -> None:
        """Drop the gradients of backward passes since the last step."""
        for parameter in self._all_parameters():
            parameter.grad = None

    def _keys(self) -> set[int]:
        return set(map(id, self._all_parameters()))

    def _refuse_local_gradients(self, are_reduced: bool) -> None:
        """Raise StepError for gradients that are not reduced: workers would diverge."""
        if not are_reduced:
            raise StepError(
                "optimizer.step() of a batch whose gradients were not reduced: each loop body needs a backward pass "
                "outside of no_sync(), of an output of the DistributedDataParallel itself (not of its .module); where "
                "some parameters get no gradient in it, pass find_unused_parameters=True"
            )
        _refuse_unreduced(self, self._farandole_reduced)


def make_stepping(optimizer: torch.optim.Optimizer, paths: Sequence[DdpPath]) -> None:
    """Make `optimizer`, the same object, decide steps from now on. Raises ConfigError for one that cannot."""
    if any(kind.__name__ in _OF_THEIR_OWN for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} divides its work among the workers of the generation in which it was created, "
            f"and cannot follow the membership: use the optimizer that it contains"
        )
    reduced = frozenset[int]().union(*(path.keys for path in paths))
    _refuse_unreduced(optimizer, reduced)
    namespace = {"__module__": type(optimizer).__module__, **overriding_methods(type(optimizer))}
    base, scales = type(optimizer), getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer.__class__ = type(base.__name__, (SteppingOptimizer, base), namespace)
    assert isinstance(optimizer, SteppingOptimizer)
    optimizer.__dict__.pop("_step_supports_amp_scaling", None)
    optimizer._base_scales = bool(scales)
    optimizer._farandole_paths, optimizer._farandole_reduced = list(paths), reduced
    optimizer._farandole_global_batch = None
    if "step" in optimizer.__dict__:
        as_schedulers_patch_it(optimizer)
    for path in paths:
        path.own(optimizer._keys())


def _refuse_unreduced(optimizer: torch.optim.Optimizer, reduced: frozenset[int]) -> None:
    """Raise ConfigError for a parameter whose gradients are not reduced: workers would diverge."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in reduced:
                raise ConfigError(
                    f"parameter {place} of group {number} of the optimizer, of shape {tuple(parameter.shape)}, is "
                    f"reduced by no DistributedDataParallel of the TorchState: its gradients would differ between "
                    f"workers. Let it require gradients before its module is wrapped"
                )
