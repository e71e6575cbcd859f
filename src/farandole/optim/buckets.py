"""Flat buffers into which gradients are copied while they are in the cache, and from which they are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from farandole.collectives.shared_memory.tensors import reserve_zeros, shareable_zeros
from farandole.optim.bucket_size import cut
from farandole.optim.device_order import wait_for_device


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced at once. `flat` is a part of a buffer, `parameters` those whose gradients are in
    it."""

    flat: torch.Tensor
    parameters: tuple[torch.Tensor, ...]


class Buckets:
    """Buffers, one for each dtype, on the parameters' device, with their partition into buckets. Their order is that in
    which gradients arrive: the last parameter's first.

    flats    the buffers
    buckets  at least one; empty if there are no parameters
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._order = list(reversed(parameters))
        self.device = self._order[0].device if self._order else torch.device("cpu")
        self.flats = []
        self._view: dict[int, torch.Tensor] = {}
        for dtype, members in _by_dtype(self._order).items():
            sizes = [member.numel() for member in members]
            flat = shareable_zeros(sum(sizes), dtype, self.device)
            self.flats.append(flat)
            for member, piece in zip(members, torch.split(flat, sizes), strict=True):
                self._view[id(member)] = piece.view_as(member)
        wait_for_device(self.device)  # other streams that write gradients here need not know the current one
        self.cut(0)

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the buffer part for the parameter's gradient; same shape and dtype."""
        return self._view[id(parameter)]

    @property
    def total_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def cut(self, least_bytes: int) -> None:
        """Make buckets of at least this size; with 0 one for each dtype."""
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._order]
        groups = cut(sizes, [str(parameter.dtype) for parameter in self._order], least_bytes)
        self.buckets = [self._bucket([self._order[place] for place in group]) for group in groups]
        if not self.buckets:
            self.buckets = [Bucket(torch.empty(0), ())]

    def _bucket(self, parameters: list[torch.Tensor]) -> Bucket:
        """Make a bucket of parameters that are adjacent in a buffer: they have one dtype, and follow each other."""
        first = self.view(parameters[0])
        flat = next(each for each in self.flats if each.dtype == first.dtype)
        begin = first.storage_offset() - flat.storage_offset()
        count = sum(parameter.numel() for parameter in parameters)
        return Bucket(flat[begin : begin + count], tuple(parameters))


def reserve(parameters: Iterable[torch.Tensor]) -> None:
    """Allocate the memory that Buckets of these parameters will need, if they are on the CPU. A newcomer does so, so
    that no worker waits for it in its first step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.device.type == "cpu"]
    for dtype, members in _by_dtype(trained).items():
        reserve_zeros(sum(member.numel() for member in members), dtype)


def _by_dtype(parameters: Iterable[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return found
