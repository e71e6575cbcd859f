"""Properties of an optimizer's parameters that are known before a reduction. step_reduction.py and
bucketed_gradients.py use it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from farandole.errors import ConfigError


def check_devices(parameters: Mapping[torch.Tensor, str]) -> None:
    """Raise ConfigError unless all parameters are on one device, the CPU or another one that has memory."""
    first: torch.device | None = None
    for parameter, name in parameters.items():
        first = first or parameter.device
        if parameter.device != first or first.type == "meta":
            devices = sorted({str(each.device) for each in parameters})
            raise ConfigError(
                f"{name} of shape {tuple(parameter.shape)} is on {parameter.device}, and the optimizer's parameters "
                f"are on {', '.join(devices)}; a worker trains on one device: move the model to it, as in "
                f"model.to(fd.device()), before the optimizer is created"
            )


def describe(parameters: Mapping[torch.Tensor, str]) -> list[str]:
    """Return name, shape and dtype of each parameter."""
    return [f"{name} {_kind(parameter)}" for parameter, name in parameters.items()]


def digest(parameters: Mapping[torch.Tensor, str]) -> int:
    """Return 63 bits that tell models apart by number, shapes and dtypes of their parameters; not by names."""
    text = ";".join(_kind(parameter) for parameter in parameters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _kind(parameter: torch.Tensor) -> str:
    return f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
