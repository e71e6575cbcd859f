"""The common part of Farandole's optimizers: the user's class as base, hooks on its parameters, GradScaler's
protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from farandole.collectives import world
from farandole.errors import StepError
from farandole.optim.options import check_passes, names_of
from farandole.optim.own_methods import OwnMethods, overriding_methods
from farandole.optim.passes import Passes
from farandole.optim.scaled_step import as_schedulers_patch_it
from farandole.state import loop_hooks
from farandole.state.optimizer_state import load_state_dict_in_place, with_inner

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_hook_of: Any = WeakTensorKeyDictionary()
"""The hook of Farandole on each parameter. A script that wraps anew leaves old optimizers behind, which must not reduce
too: the newest hook counts, and an old optimizer that is stepped nevertheless reduces in step()."""


def wrap(optimizer: OptimizerT, mixin: type[WrappedOptimizer]) -> OptimizerT:
    """Return an instance of a class made of `mixin` and the user's class. It shares all attributes with the given
    optimizer: functions that its class has bound to `self` see the same ones."""
    if isinstance(optimizer, WrappedOptimizer):
        raise StepError("this optimizer is a DistributedOptimizer already; wrap it once")
    if any(isinstance(each, WrappedOptimizer) for each in with_inner("optimizer", optimizer).values()):
        raise StepError(
            f"there is a DistributedOptimizer inside of this {type(optimizer).__name__}: wrap the outermost one only"
        )
    world.current()  # NotInitialized is clearer here than in the first backward pass
    base = optimizer.__class__
    wrapped_class = type(base.__name__, (mixin, base), {"__module__": base.__module__, **overriding_methods(base)})
    wrapped: OptimizerT = object.__new__(wrapped_class)
    wrapped.__dict__ = optimizer.__dict__
    if "step" in wrapped.__dict__:
        as_schedulers_patch_it(wrapped)
    return wrapped


def counts_passes() -> bool:
    """Return whether there are, or may soon be, other workers to reduce with: otherwise any number of passes is
    allowed."""
    here = world.current()
    return here.placement.size > 1 or (loop_hooks.is_elastic() and here.id.number > 0)


class WrappedOptimizer(OwnMethods):
    """Base of the mixins of Farandole. It is put before the user's optimizer class."""

    farandole_attributes = OwnMethods.farandole_attributes | {"_passes", "_parameter_names"}

    def _set_up(self, named_parameters: Iterable[Any] | None, passes_per_step: int) -> None:
        # Fused optimizers unscale and skip by themselves; they declare it on the instance or on their class.
        self._base_scales = bool(self.__dict__.pop("_step_supports_amp_scaling", self.__dict__.get("_base_scales")))
        self._passes = Passes(check_passes(passes_per_step))
        self._parameter_names = names_of(self.param_groups, named_parameters)
        self._hook_parameters()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter, while the gradient is in the cache."""
        raise NotImplementedError

    def _hook_parameters(self) -> None:
        """Hook all parameters that can ever have a gradient: one that is frozen now may be trained later."""
        for parameter in self._all_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                _hook(parameter, self._on_gradient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does; the new parameters are reduced from the next backward pass on."""
        super().add_param_group(param_group)
        self._parameter_names = {**names_of(self.param_groups, None), **self._parameter_names}
        self._hook_parameters()

    # Backward passes -------------------------------------------------------------------------------------

    @property
    def backward_passes_per_step(self) -> int:
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this number of passes from now on; those since the last step do not count. Raises ValueError."""
        self._passes.per_step = check_passes(passes)
        self._passes.restart()

    def abandon_step(self) -> None:
        """Drop the results of backward passes since the last step: gradients and the count of passes.

        For use after a failed collective, when gradients may be partly reduced. A TorchState calls it in restore().
        """
        self._passes.forget()
        for parameter in self._all_parameters():
            parameter.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does; backward passes are counted from zero again."""
        self._passes.forget()
        load_state_dict_in_place(self, super().load_state_dict, state_dict)


def _hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    old: RemovableHandle | None = _hook_of.get(parameter)
    if old is not None:
        old.remove()
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_(True)  # torch accepts hooks only then, and keeps them
    _hook_of[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if is_frozen:
        parameter.requires_grad_(False)
