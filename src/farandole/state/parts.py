"""What the states of both rules have in common: their small state is packed, their large state taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole.errors import ConfigError
from farandole.state.packing import Packed, pack


def is_stateful(value: object) -> bool:
    """Whether an object says what it has to keep: a scheduler, a GradScaler."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def load_stateful(value: Any, saved: Any) -> None:
    """load_state_dict(). A GradScaler also forgets what it did since its last update(): its own leaves that, and
    would refuse to do the step again."""
    value.load_state_dict(saved)
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        value._per_optimizer_states.clear()


def pack_small(small: Mapping[str, Any]) -> Packed:
    """Raises ConfigError for the one of small["values"] that cannot be pickled."""
    try:
        return pack(small)
    except Exception as error:
        for name, value in small["values"].items():
            _refuse_unpicklable(name, value, error)
        raise


def refuse_other_model(
    ours: Mapping[str, Mapping[str, torch.Tensor]], theirs: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Raise ConfigError, naming the parameter, unless both have the same parameters. By module and name."""
    here = {f"{name}.{key}": tuple(p.shape) for name, group in ours.items() for key, p in group.items()}
    there = {f"{name}.{key}": tuple(p.shape) for name, group in theirs.items() for key, p in group.items()}
    for key in [*here, *there]:
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"workers have different models: parameter {key} is {here.get(key, 'missing')} here and "
                f"{there.get(key, 'missing')} on the source rank; every worker must build the same model"
            )


def _refuse_unpicklable(name: str, value: object, error: Exception) -> None:
    try:
        pack(value)
    except Exception:  # noqa: BLE001 - pickle raises whatever the value's own methods raise
        raise ConfigError(
            f"state.{name} of type {type(value).__name__} cannot be pickled ({error}); other workers could not "
            f"take it over: give TorchState values that can, or objects with state_dict()"
        ) from error
