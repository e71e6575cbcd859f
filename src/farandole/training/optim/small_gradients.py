"""Small gradients on the CPU, which are copied into their bucket some at a time: an operation takes longer to call than
to copy a few values.
"""

from __future__ import annotations

import torch

from farandole.training.optim.buckets import Buckets, has_own_order

_MOST_ELEMENTS = 4096
_MOST_WAITING = 32
"""Gradients are copied while they are in the cache."""


class SmallGradients:
    """Gradients that wait for write(). Each belongs into its parameter's part of `buckets`, times a factor."""

    def __init__(self, buckets: Buckets, parameters: list[torch.Tensor]) -> None:
        self._flats = buckets.flats
        self._places = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in buckets.flats]
        is_on_cpu = buckets.device.type == "cpu"
        self._parts = {id(each): buckets.part(each) for each in parameters if is_on_cpu and _is_small(each)}
        self._waiting: dict[tuple[int, int], torch.Tensor] = {}  # by their place
        self._factor = 1.0

    def take(self, parameter: torch.Tensor, factor: float) -> bool:
        """Take `factor` times the parameter's `.grad`, for its part. False: it has to be written at once."""
        part, gradient = self._parts.get(id(parameter)), parameter.grad
        if (
            part is None
            or type(gradient) is not torch.Tensor
            or gradient.is_sparse
            or gradient.requires_grad
            or gradient.shape != part.shape
            or gradient.dtype is not part.dtype
            or not gradient.is_contiguous()
            # In a bucket: autograd has added to the gradient of the last step, or the script has set another one's.
            or any(begin <= gradient.data_ptr() < end for begin, end in self._places)
        ):
            return False
        if len(self._waiting) == _MOST_WAITING or factor != self._factor:
            self.write()
            self._factor = factor
        self._waiting[part.place] = gradient
        parameter.grad = None  # nobody else writes to its memory
        return True

    def write(self) -> None:
        """Write all that wait: those that are adjacent in one operation."""
        if not self._waiting:
            return
        run: list[torch.Tensor] = []
        number = begin = end = 0
        for place, gradient in sorted(self._waiting.items(), key=_place):
            if run and place != (number, end):
                self._write(run, self._flats[number][begin:end])
                run = []
            if not run:
                number, begin = place
                end = begin
            run.append(gradient)
            end += gradient.numel()
        self._write(run, self._flats[number][begin:end])
        self._waiting.clear()

    def _write(self, run: list[torch.Tensor], part: torch.Tensor) -> None:
        if len(run) == 1:
            torch.mul(run[0].view(-1), self._factor, out=part)
            return
        torch.cat([each if each.dim() == 1 else each.view(-1) for each in run], out=part)
        if self._factor != 1.0:
            part.mul_(self._factor)


def _is_small(parameter: torch.Tensor) -> bool:
    return 0 < parameter.numel() <= _MOST_ELEMENTS and not has_own_order(parameter)


def _place(item: tuple[tuple[int, int], torch.Tensor]) -> tuple[int, int]:
    return item[0]
