"""Running statistics of BatchNorm layers. Each worker computes them from its own samples; they are made equal at epoch
ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _NormBase

from farandole.collectives.transport import Transport


def layers_with_statistics(modules: Iterable[torch.nn.Module]) -> list[_NormBase]:
    """Return the layers that keep a running mean and variance, each once, in the order of modules()."""
    found = {id(each): each for module in modules for each in module.modules()}
    return [each for each in found.values() if isinstance(each, _NormBase) and each.running_mean is not None]


def make_equal(layers: list[_NormBase], transport: Transport) -> None:
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
