"""Flat buffers that gradients are copied into while they are hot, and reduced from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farandole.collectives.shared_memory.tensors import shareable_zeros
from farandole.errors import ConfigError


@dataclass(frozen=True)
class Bucket:
    """One flat buffer of one dtype; `views[i]` has the shape of `parameters[i]` and lies in `flat`."""

    flat: torch.Tensor
    parameters: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]


class BucketPlan:
    """Which gradient goes where: one bucket for each dtype, in the order of the parameters.

    Costs one copy of the gradients; `.grad` becomes a view of it, so that nothing is copied back.
    Raises ConfigError for parameters that are not on the CPU.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        for index, parameter in enumerate(parameters):
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"parameter {index} of shape {tuple(parameter.shape)} is on {parameter.device}; "
                    f"this version reduces CPU tensors only: keep the model on the CPU"
                )
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.buckets = [_bucket(dtype, members) for dtype, members in by_dtype.items()]
        self._view = {
            id(parameter): view
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self.digest = _digest(parameters)

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Where the gradient of `parameter` goes; same shape and dtype."""
        return self._view[id(parameter)]

    def holds(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._view


def _bucket(dtype: torch.dtype, parameters: list[torch.Tensor]) -> Bucket:
    sizes = [parameter.numel() for parameter in parameters]
    flat = shareable_zeros(sum(sizes), dtype)
    pieces = torch.split(flat, sizes)
    views = tuple(piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True))
    return Bucket(flat, tuple(parameters), views)


def _digest(parameters: Sequence[torch.Tensor]) -> int:
    """63 bits that tell models apart by number, shapes and dtypes of their parameters."""
    text = ";".join(f"{tuple(parameter.shape)}{parameter.dtype}" for parameter in parameters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
