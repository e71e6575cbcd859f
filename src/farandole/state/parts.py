"""Functions that the states of both rules share: they pack metadata, and check and load tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole.errors import ConfigError
from farandole.state.packing import Packed, pack, unpack
from farandole.state.streaming import as_bytes


def is_stateful(value: object) -> bool:
    """Return whether an object defines its own state: a scheduler, a GradScaler."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def load_stateful(value: Any, saved: Any) -> None:
    """Call load_state_dict(). A GradScaler also forgets its actions since its last update(): load_state_dict() keeps
    them, and the scaler would refuse to repeat the step."""
    value.load_state_dict(saved)
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        value._per_optimizer_states.clear()


def load_value(live: Any, saved: Any) -> Any:
    """Return `saved`, loaded into the `live` object where that can be changed in place: a script may have other
    references to a tensor, list, dictionary or set that it has given to a state."""
    if type(live) is not type(saved):
        return saved
    if isinstance(saved, torch.Tensor):
        if (live.shape, live.dtype, live.requires_grad) != (saved.shape, saved.dtype, saved.requires_grad):
            return saved
        with torch.no_grad():
            live.copy_(saved)
        return live
    if isinstance(saved, list):
        live[:] = [load_value(*both) for both in zip(live, saved, strict=False)] + saved[len(live) :]
    elif isinstance(saved, dict):
        values = {key: load_value(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(values)
    elif isinstance(saved, set):
        live.clear()
        live.update(saved)
    else:
        return saved
    return live


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors by their bytes. Objects that cannot be compared are pickled."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    equal = one == other
    if isinstance(equal, bool) and equal:
        return True
    return _pickled(one) == _pickled(other)  # NaN, NumPy arrays, objects without a usable __eq__()


def _pickled(value: Any) -> bytes:
    """Pickle a copy of the value: the bytes would otherwise show which parts are one object."""
    packed = pack(value)
    return pack(unpack(packed)).skeleton + b"".join(bytes(as_bytes(each)) for each in packed.tensors)


def pack_metadata(metadata: Mapping[str, Any]) -> Packed:
    """Pack the metadata. Raises ConfigError for the item of metadata["values"] that cannot be pickled."""
    try:
        return pack(metadata)
    except Exception as error:
        for name, value in metadata["values"].items():
            _refuse_unpicklable(name, value, error)
        raise


def refuse_other_model(
    ours: Mapping[str, Mapping[str, torch.Tensor]], theirs: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Raise ConfigError, naming the parameter, unless both have the same parameters, by module and name."""
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
    except Exception:  # noqa: BLE001 - pickle raises any error of the value's own methods
        raise ConfigError(
            f"state.{name} of type {type(value).__name__} cannot be pickled ({error}); other workers could not "
            f"take it over: give TorchState values that can, or objects with state_dict()"
        ) from error
