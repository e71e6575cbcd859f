"""The step of the user's optimizer class below one of ours, by GradScaler's rules. wrapping.py and ddp/ use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from farandole.errors import StepError


class ScaledStep(torch.optim.Optimizer):
    """Mixed in before the user's optimizer class."""

    # GradScaler then always calls our step(), also when it would skip: a skipped step is decided too.
    _step_supports_amp_scaling = True
    _base_scales: bool
    """Whether the user's class unscales and skips by itself: fused ones do."""

    def _apply(self, closure: Callable[[], float] | None = None, gradients: Iterable[torch.Tensor] = ()) -> Any:
        """The step of the user's class, by GradScaler's rules if one has called us: `gradients` are unscaled
        before, and nothing happens on inf or NaN. It has put `grad_scale` and `found_inf` on us, which the
        user's class must not see, and takes them off."""
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


STEPPED_TWICE = "optimizer.step() twice for one batch of the loader; call it once in each loop body"


def refuse_closure(closure: object | None) -> None:
    """With a loader of Farandole. Raises StepError."""
    if closure is not None:
        raise StepError(
            "step(closure) would run several backward passes in one step, which would be reduced separately; call "
            "backward() first and step() without a closure"
        )
