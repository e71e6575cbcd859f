"""Optimizers of torch for parameters of a DistributedDataParallel, or that FSDP2 has divided: they decide steps, as a
DistributedOptimizer does. module.py and elastic_shards.py convert them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from farandole.errors import ConfigError
from farandole.training.optim.distributed_optimizer import decide_along, step_along
from farandole.training.optim.optimizer_mixin import OwnMethods, become, closure_of, zeroing
from farandole.training.state import step
from farandole.training.state.batch import Batch


class Reducer(Protocol):
    """What reduces the gradients of parameters, by id."""

    keys: frozenset[int]

    def own(self, keys: Any) -> Any:
        """Return the path of the gradients of an optimizer's parameters."""
        ...


_OF_THEIR_OWN = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # by name: their import is slow


class SteppingOptimizer(OwnMethods):
    """The mixin of such an optimizer. make_stepping() puts it before the user's class."""

    farandole_attributes = OwnMethods.farandole_attributes | {"_farandole_paths", "_farandole_reduced"}

    _farandole_paths: Sequence[Any]
    _farandole_reduced: frozenset[int]  # parameters, by id

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does. With a batch of a DataLoader of Farandole it returns True if all workers have applied the
        step. False: a worker was lost and the same batch comes again, or further micro-batches follow."""
        closure, apply = closure_of(self, closure, args, kwargs)
        batch = step.batch()
        if batch is None:
            loss = apply(gradients=self._gradients()) if closure is None else apply(closure)
            step.mark_stepped(self)
            return loss
        _refuse_unreduced(self, self._farandole_reduced)
        return step_along(self._farandole_paths, self, batch, apply, closure)

    def _decide_within(self, batch: Batch) -> None:
        _refuse_unreduced(self, self._farandole_reduced)
        decide_along(self._farandole_paths, self, batch)

    # torch wraps step() of every optimizer class with a profiler range and hooks; the base class's step() is wrapped
    # already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as torch does, except while the micro-batches of a global batch are being accumulated."""
        batch = step.batch() if step.is_undecided() else None
        may_zero = [] if batch is None else [path.begin_zeroing(batch) for path in self._farandole_paths]
        if not all(may_zero):
            return
        super().zero_grad(**zeroing(set_to_none))
        if batch is not None and not set_to_none:
            for path in self._farandole_paths:
                path.zeroed()

    def abandon_step(self) -> None:
        """Drop the gradients of backward passes since the last step."""
        for parameter in self._all_parameters():
            parameter.grad = None


def make_stepping(optimizer: torch.optim.Optimizer, modules: Sequence[Reducer]) -> None:
    """Make `optimizer`, the same object, decide steps from now on. Raises ConfigError for one that cannot."""
    if any(kind.__name__ in _OF_THEIR_OWN for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} divides its work among the workers of the generation in which it was created, "
            f"and cannot follow the membership: use the optimizer that it contains"
        )
    reduced = frozenset[int]().union(*(module.keys for module in modules))
    _refuse_unreduced(optimizer, reduced)
    scales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    become(optimizer, SteppingOptimizer)
    assert isinstance(optimizer, SteppingOptimizer)
    optimizer.__dict__.pop("_step_supports_amp_scaling", None)
    optimizer._base_scales, optimizer._farandole_reduced = scales, reduced
    keys = {id(parameter) for parameter in optimizer._all_parameters()}
    optimizer._farandole_paths = [module.own(keys) for module in modules]


def _refuse_unreduced(optimizer: torch.optim.Optimizer, reduced: frozenset[int]) -> None:
    """Raise ConfigError for a parameter whose gradients are not reduced: workers would diverge."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in reduced:
                raise ConfigError(
                    f"parameter {place} of group {number} of the optimizer, of shape {tuple(parameter.shape)}, is "
                    f"reduced by no DistributedDataParallel of the TorchState, and by no module that fully_shard() has "
                    f"divided: its gradients would differ between workers. Let it require gradients before its module "
                    f"is wrapped"
                )
