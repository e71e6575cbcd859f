"""How small tensors come from the loader processes: in the message itself. loader.py puts this around worker_init_fn.

torch sends a tensor's shared memory instead, a file descriptor that the receiver fetches over a connection of its own:
half a millisecond for each tensor, and more when the processors are busy. That is the right way for large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

# So that what two loader processes have made ahead fits into the pipe (64 KiB). A loader process that is killed while
# it waits for room leaves half a message there, and torch notices that in the main thread only.
_LARGEST_BYTES = 16 * 1024


class SmallByValue:
    """A worker_init_fn. Two tensors of a batch that share memory no longer do so when they have come by value."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ForkingPickler.register(torch.Tensor, reduced)
        if self._then is not None:
            self._then(worker)


def reduced(tensor: torch.Tensor) -> Any:
    """How to pickle a tensor: by value when it is small and numpy has its like, else as torch does it."""
    is_dense = tensor.layout is torch.strided and tensor.is_cpu
    # Of other strides, channels last for one, numpy would keep the values only.
    if is_dense and tensor.nbytes <= _LARGEST_BYTES and tensor.is_contiguous():
        try:
            return torch.from_numpy, (tensor.numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, quantized, with a gradient
            pass
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
