"""Advice to a script about its optimizer, given once."""

from __future__ import annotations

import warnings

import torch

from farandole.collectives import world

_LARGE = 10_000_000  # parameters: some tens of milliseconds in each step

_has_advised = False


def recommend_fused(optimizer: torch.optim.Optimizer) -> None:
    """Warn, once and on rank 0 only, when a large model on the CPU is stepped one parameter after the other although
    its optimizer has a faster implementation. No warning if the script has chosen (`fused=False`, `foreach=False`)."""
    global _has_advised
    if _has_advised or world.current().placement.rank != 0:
        return
    option = next((each for each in ("fused", "foreach") if each in optimizer.defaults), None)
    groups = optimizer.param_groups
    if option is None or any(group.get(name) is not None for group in groups for name in ("fused", "foreach")):
        return
    count = sum(each.numel() for group in groups for each in group["params"] if each.device.type == "cpu")
    if count < _LARGE:
        return
    _has_advised = True
    name = type(optimizer).__name__
    warnings.warn(
        f"{name} steps through {count / 1e6:.0f} million parameters with many small operations, which takes several "
        f"times as long as with {option}=True on the CPU: write {name}(..., {option}=True), or {option}=False to keep "
        f"it as it is",
        RuntimeWarning,
        stacklevel=3,
    )
