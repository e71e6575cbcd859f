"""Buffers and extra state of a module, by name. StepState reads them in each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

ExtraState: TypeAlias = dict[str, torch.nn.Module]
"""Modules that have an extra state (`get_extra_state()`), by their names in the containing module."""


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return dict(module.named_buffers()), several times as fast: most modules have no buffers and need no name."""
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
