"""The step of the user's optimizer class, called from Farandole's by GradScaler's rules. optimizer_mixin.py and ddp/
use it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from farandole.errors import ConfigError, StepError
from farandole.state.global_batch import Batch


class ScaledStep(torch.optim.Optimizer):
    """A mixin that is put before the user's optimizer class."""

    # GradScaler then always calls step(), even when it would skip: a skipped step is decided too (torch 2.13,
    # torch/amp/grad_scaler.py, GradScaler.step).
    _step_supports_amp_scaling = True
    _base_scales: bool
    """True when the user's class unscales and skips by itself, as fused ones do."""

    def _apply(self, closure: Callable[[], float] | None = None, gradients: Iterable[torch.Tensor] = ()) -> Any:
        """Run the step of the user's class. If a GradScaler has called, its rules apply: `gradients` are unscaled
        before, and nothing happens on inf or NaN. The GradScaler sets `grad_scale` and `found_inf` on this object,
        which the user's class must not see, and removes them."""
        if self._base_scales:
            return super().step(closure)
        names = ("grad_scale", "found_inf")
        asked: dict[str, Any] = {name: self.__dict__.pop(name) for name in names if name in self.__dict__}
        scale, found_inf = asked.get("grad_scale"), asked.get("found_inf")
        try:
            if found_inf is not None and bool(found_inf):
                return None
            if scale is not None:
                inverse = scale.double().reciprocal().float()
                for gradient in gradients:
                    gradient.mul_(inverse.to(gradient.device, gradient.dtype))
            return super().step(closure)
        finally:
            self.__dict__.update(asked)

    def _all_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._all_parameters() if parameter.grad is not None]


STEPPED_TWICE = "optimizer.step() was called twice for one batch of the loader; call it once in each loop body"


def refuse_closure(batch: Batch) -> None:
    """Raise StepError for step(closure) where the backward passes of the closure would not be the whole step."""
    if batch.global_batch.micro_batches > 1 or batch.is_padding:
        raise StepError(
            "step(closure) with micro-batches of a DataLoader of Farandole: the closure's backward pass would be one "
            "of several. Call backward() first and step() without a closure, or leave micro_batch_size out"
        )


def zeroing(set_to_none: bool) -> dict[str, bool]:
    """Return arguments for zero_grad() of the user's class, which may take none."""
    return {} if set_to_none else {"set_to_none": False}


def call_dropped(closure: Callable[[], Any]) -> Any:
    """Call the closure of an aborted step: its loss may be needed, its gradients do not count."""
    with torch.enable_grad():
        return closure()


def as_schedulers_patch_it(optimizer: torch.optim.Optimizer) -> None:
    """Replace the patched step() on an optimizer by the current class's. A scheduler that was made before has set the
    step of the user's class on the object, to see its calls (torch 2.13, torch/optim/lr_scheduler.py,
    patch_track_step_called). Raises ConfigError for a step() that has another origin.
    """
    patched = optimizer.__dict__["step"]
    if not getattr(patched, "_wrapped_by_lr_sched", False):
        raise ConfigError(
            f"step() of this {type(optimizer).__name__} was replaced on the object; override step() in a subclass, so "
            f"that it can be called only when the step is applied"
        )
    reference = weakref.ref(optimizer)

    @functools.wraps(patched)
    def step(*args: Any, **kwargs: Any) -> Any:
        each: Any = reference()
        each._opt_called = True
        return type(each).step(each, *args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
