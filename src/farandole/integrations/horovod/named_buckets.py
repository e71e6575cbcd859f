"""The gradients of the named path in buckets: one named operation for each dtype, instead of one for each gradient.

Each gradient is copied into its bucket when it arrives, while it is in the cache, and `.grad` becomes a part of the
bucket: nothing is copied back. All ranks decide alike which gradients are in buckets, from the optimizer's arguments
and the parameters alone, so that a worker that has just joined decides as the others do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from farandole.integrations.horovod.named.calls import REDUCIBLE
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.buckets import Buckets, has_own_order, is_same_memory
from farandole.training.optim.compression import BF16Compressor, FP16Compressor, NoneCompressor
from farandole.training.optim.options import Options

# Buffers of one set of parameters. A script that keeps the gradients of its last step needs two of them.
_MOST_BUFFERS = 3

_OPS = (Reduction.AVERAGE, Reduction.SUM)
_COMPRESSORS = (NoneCompressor, FP16Compressor, BF16Compressor)  # those that act on each number by itself


def may_use_buckets(options: Options) -> bool:
    """Return whether the optimizer's arguments allow buckets."""
    return options.op in _OPS and not options.groups and options.compression in _COMPRESSORS


def fits(parameter: torch.Tensor) -> bool:
    """Return whether dense gradients of the parameter can be in a bucket."""
    return (
        parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and parameter.dtype in REDUCIBLE
        and parameter.is_floating_point()
    )


class NamedBuckets:
    """The buckets of some parameters of one optimizer, and the gradients in them.

    Args:
        named: The parameters with their names, in the same order on all ranks.
    """

    def __init__(self, named: Sequence[tuple[torch.Tensor, str]]) -> None:
        self._parameters = [parameter for parameter, _ in named]
        self._ids = set(map(id, self._parameters))
        # A different set of gradients on another rank differs in its size, which is an error on all ranks.
        self._name = f"gradients.{named[0][1]}{_order_of(self._parameters)}"
        self._buffers: list[Buckets] = []
        self._now: Buckets | None = None  # those of the current step
        self._kept_apart: list[torch.Tensor] = []  # parameters whose `.grad` is not in its bucket

    def have(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter's gradient is in a bucket."""
        return id(parameter) in self._ids

    def take(self, parameter: torch.Tensor) -> None:
        """Take a gradient that has just arrived into its bucket, if it can be there."""
        gradient = parameter.grad
        if gradient is None or id(parameter) not in self._ids:
            return
        buckets = self._current()
        view = buckets.view(parameter)
        if not is_same_memory(gradient, view) and _can_move(gradient, view):
            view.copy_(gradient)
            buckets.publish(parameter)

    def fill(self) -> None:
        """Take all gradients, with zeros where there is none."""
        self._kept_apart.clear()
        buckets = self._current()
        moved = [each for each in self._parameters if not is_same_memory(each.grad, buckets.view(each))]
        # Read before anything is written: a script can give a parameter the gradient of another one.
        values = [buckets.apart(each.grad) for each in moved]
        for parameter, value in zip(moved, values, strict=True):
            gradient, view = parameter.grad, buckets.view(parameter)
            if value is None:
                view.zero_()
            else:
                view.copy_(value)
            if gradient is not None and not _can_move(gradient, view):
                self._kept_apart.append(parameter)
            else:
                buckets.publish(parameter)

    def flats(self) -> list[tuple[str, torch.Tensor]]:
        """Return what is to be reduced, a flat tensor for each dtype, with a name."""
        flats = enumerate(self._current().flats)
        return [(f"{self._name}.{number}" if number else self._name, flat) for number, flat in flats]

    def publish(self) -> None:
        """Write the reduced gradients where `.grad` is not in its bucket. The next gradient begins another step."""
        buckets = self._current()
        for parameter in self._kept_apart:
            gradient = parameter.grad
            assert gradient is not None
            gradient.detach().copy_(buckets.view(parameter))
        self.forget()

    def forget(self) -> None:
        """Begin another step."""
        self._now = None
        self._kept_apart.clear()

    def _current(self) -> Buckets:
        """Return the buckets of this step, in which nobody else looks for gradients of an earlier one."""
        if self._now is None:
            self._now = next((each for each in self._buffers if not self._are_kept(each)), None)
        if self._now is None:
            self._now = Buckets(self._parameters)
            self._buffers = [self._now, *self._buffers[: _MOST_BUFFERS - 1]]
        return self._now

    def _are_kept(self, buckets: Buckets) -> bool:
        """Return whether a script refers to a gradient that is not a `.grad` any more, or to a part of one."""
        shown = sum(is_same_memory(each.grad, buckets.view(each)) for each in self._parameters)
        return buckets.uses() > buckets.known_uses + shown


def _can_move(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether `view` can take the place of `.grad`: not of one through which autograd differentiates."""
    return not gradient.requires_grad and gradient.dtype == view.dtype and gradient.layout == torch.strided


def _order_of(parameters: Sequence[torch.Tensor]) -> str:
    """Return a part of the name of buckets: ranks whose parameters have other orders in memory must not add them up."""
    strides = [each.stride() if has_own_order(each) else () for each in parameters]
    return f".{zlib.crc32(repr(strides).encode()):08x}" if any(strides) else ""
