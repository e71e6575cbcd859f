"""Run replicas on CUDA devices with torch's own functions. Their graphs are the caller's.

torch's engine has a thread for each device. This module is thin, and not run without such devices: only the copying of
data_parallel.py's outputs is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import replicate

from farandole.parallel.dividing import Part
from farandole.parallel.nesting import changed
from farandole.parallel.placement import Placement
from farandole.parallel.thread_pool import ThreadPool


def compute_on_devices(
    module: torch.nn.Module, parts: Sequence[Part], placement: Placement, pool: ThreadPool
) -> list[Any]:
    """Return the outputs of the replicas, on the output device."""
    devices = placement.devices[: len(parts)]
    copies = replicate(module, devices, detach=not torch.is_grad_enabled())
    tasks: list[Callable[[], Any]] = [
        partial(_compute, copy, moved(part.args, device), moved(part.kwargs, device), device)
        for copy, part, device in zip(copies, parts, devices, strict=True)
    ]
    return [moved(output, placement.output) for output in pool.run(tasks)]


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on the device; gradients flow back."""
    return changed(value, lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf)


def _compute(replica: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    with torch.cuda.device(device):
        return replica(*args, **kwargs)
