"""Buffers, extra state and BatchNorm's statistics of a module. StepState reads the buffers in each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase

from farandole.collectives.transport import Transport

ExtraState: TypeAlias = dict[str, torch.nn.Module]
"""Modules that have an extra state (`get_extra_state()`), by their names in the containing module."""


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return dict(module.named_buffers()), several times as fast: most modules have no buffers and need no name.

    The private dicts are those that Module.named_buffers() reads (torch 2.13, torch/nn/modules/module.py).
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    _collect(module, "", found, seen)
    return found


def _collect(module: torch.nn.Module, prefix: str, found: dict[str, torch.Tensor], seen: set[int]) -> None:
    """Collect buffers in the order of named_buffers(): a module's own, then those of its children. Shared ones once."""
    if module._buffers:
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[prefix + name] = buffer
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", found, seen)


def modules_with_extra_state(module: torch.nn.Module) -> ExtraState:
    """Return the submodules, `module` included, whose class defines get_extra_state()."""
    plain = torch.nn.Module.get_extra_state
    return {name: each for name, each in module.named_modules() if type(each).get_extra_state is not plain}


def extra_state_of(modules: ExtraState) -> dict[str, Any]:
    """Return the extra state of each module: the module's own object, not a copy."""
    return {name: each.get_extra_state() for name, each in modules.items()}


def load_extra_state(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the extra state that extra_state_of() returned into the submodules."""
    for name, value in saved.items():
        module.get_submodule(name).set_extra_state(value)


# Running statistics of BatchNorm layers -------------------------------------------------------------------------------
#
# Each worker computes them from its own samples; they are made equal at epoch ends.


def layers_with_statistics(modules: Iterable[torch.nn.Module]) -> list[_NormBase]:
    """Return the layers that keep a running mean and variance, each once, in the order of modules()."""
    found = {id(each): each for module in modules for each in module.modules()}
    return [each for each in found.values() if isinstance(each, _NormBase) and each.running_mean is not None]


def make_statistics_equal(layers: list[_NormBase], transport: Transport) -> None:
    """Give every worker the mean of all running means, and the variance of all samples together. The variance is the
    mean of the variances plus the variance of the means; every worker counts alike. Computed in float64, with the same
    bits on all ranks. All ranks call it. Raises the errors of transports, with nothing changed."""
    if not layers or transport.size == 1:
        return
    means = torch.cat([_flat(each.running_mean) for each in layers])
    variances = torch.cat([_flat(each.running_var) for each in layers])
    sums = torch.cat([means, variances + means.square()])
    transport.all_reduce(sums)
    mean, square = (sums / transport.size).chunk(2)
    start = 0
    for each in layers:
        assert each.running_mean is not None
        assert each.running_var is not None
        end = start + each.running_mean.numel()
        each.running_mean.copy_(mean[start:end])
        each.running_var.copy_((square[start:end] - mean[start:end].square()).clamp_(min=0))
        start = end


def _flat(statistics: torch.Tensor | None) -> torch.Tensor:
    assert statistics is not None
    return statistics.detach().reshape(-1).to("cpu", torch.float64)
