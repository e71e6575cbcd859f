"""A run of the loop body without effect, of which only the gradients are of interest.

Layers of chance, and those that compute statistics of a batch, are off in it: their gradients are no means over samples
by intention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

Gradients = dict[str, torch.Tensor]


class TrialBody:
    """From before the run to its end; the next run may follow.

    Args:
        modules: Their parameters' gradients are taken, and their layers are off.
        part: Returns the part of a gradient that is kept; it must not be the gradient's own memory.

    Attributes:
        gradients: Sums over the backward passes of the run, by name, the same names on all workers.
        is_coarse: A layer has computed in half precision.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._modules, self._part = list(modules), part
        self._hooks: list[Any] = []
        self._switched: set[torch.nn.Module] = set()
        self._statistics: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values
        self.gradients, self.is_coarse = Gradients(), False

    def begin(self) -> None:
        self.gradients = {}
        for number, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    note = partial(self._note, f"{number} {name}")
                    self._hooks.append(parameter.register_hook(note))  # type: ignore[no-untyped-call]
            for each in module.modules():
                if _is_off(each):
                    self._hooks.append(each.register_forward_pre_hook(self._switch_off))
                if not any(True for _ in each.children()):
                    self._hooks.append(each.register_forward_hook(self._note_precision))

    def end(self) -> Gradients:
        """Switch the layers on again, and return the gradients. Idempotent."""
        for each in self._hooks:
            each.remove()
        self._hooks.clear()
        for module in self._switched:
            module.training = True
        self._switched.clear()
        with torch.no_grad():
            for buffer, value in self._statistics:
                buffer.copy_(value)
        self._statistics.clear()
        return self.gradients

    def _switch_off(self, module: torch.nn.Module, _: object) -> None:
        if not module.training:
            return
        self._switched.add(module)
        module.training = False
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
            # Statistics are each worker's own between the ends of epochs, and all are to compute the same.
            for buffer, value in ((module.running_mean, 0.0), (module.running_var, 1.0)):
                self._statistics.append((buffer, buffer.clone()))
                with torch.no_grad():
                    buffer.fill_(value)

    def _note_precision(self, _: torch.nn.Module, __: object, output: object) -> None:
        self.is_coarse |= isinstance(output, torch.Tensor) and output.is_floating_point() and output.itemsize < 4

    @torch.no_grad()
    def _note(self, key: str, gradient: torch.Tensor) -> None:
        values = gradient.detach()
        values = self._part(values.to_dense() if values.layout is not torch.strided else values)
        before = self.gradients.get(key)
        self.gradients[key] = values if before is None else before.add_(values)


def _is_off(module: torch.nn.Module) -> bool:
    """Return whether a layer is one of BatchNorm, or of chance: also DropPath of other libraries, and attention, which
    often has a dropout of its own."""
    if isinstance(module, (_DropoutNd, _NormBase, torch.nn.MultiheadAttention)):
        return True
    name, has_children = type(module).__name__.lower(), any(True for _ in module.children())
    if "attention" in name or "attn" in name:
        return any("drop" in key.lower() and isinstance(each, float) for key, each in vars(module).items())
    return ("drop" in name or "stochastic" in name) and not has_children
