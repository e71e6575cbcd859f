"""Scale numbers before and after they are summed, by Horovod's rules for each dtype. In place, on the CPU."""

from __future__ import annotations

import torch

from farandole.collectives.reduction import Reduction

_HALVES = (torch.float16, torch.bfloat16)


def prescale(flat: torch.Tensor, factor: float) -> None:
    """Multiply every element. Integers are multiplied in float64 and truncated toward zero, halves in float32."""
    if factor != 1.0:
        _multiply(flat, factor)


def postscale(flat: torch.Tensor, op: Reduction, size: int, factor: float) -> None:
    """Turn the sum over `size` ranks into the requested result: divide it for an AVERAGE, then multiply it.

    Integers are truncated toward zero, once.
    """
    if op is not Reduction.AVERAGE:
        prescale(flat, factor)
    elif flat.dtype in _HALVES:
        flat.copy_(flat.float().div_(size).mul_(factor))
    elif flat.is_floating_point():
        flat.div_(size)
        prescale(flat, factor)
    elif factor == 1.0:
        torch.div(flat, size, rounding_mode="trunc", out=flat)
    else:
        flat.copy_(flat.double().div_(size).mul_(factor))


def _multiply(flat: torch.Tensor, factor: float) -> None:
    if flat.dtype in _HALVES:
        flat.copy_(flat.float().mul_(factor))
    elif flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))
