"""Transfer of small tensors from the loader processes, in the message itself. loader.py puts this around
worker_init_fn.

torch sends a tensor's shared memory instead, a file descriptor that the receiver fetches over a separate connection:
half a millisecond for each tensor, and more when the processors are busy. That is right for large tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

# Limited so that the batches that two loader processes prepare ahead fit into the pipe (64 KiB). A loader process that
# is killed while it waits for space leaves half a message there, which torch notices in the main thread only.
_LARGEST_BYTES = 16 * 1024


class SmallByValue:
    """A worker_init_fn that sends small tensors by value. Two tensors of a batch that share memory no longer do so
    afterwards."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ForkingPickler.register(torch.Tensor, reduced)
        if self._then is not None:
            self._then(worker)


def reduced(tensor: torch.Tensor) -> Any:
    """Return the reduction of a tensor for pickle: by value when it is small and numpy has its type, else as torch
    does."""
    is_dense = tensor.layout is torch.strided and tensor.is_cpu
    # With other strides, such as channels last, numpy would keep the values only.
    if is_dense and tensor.nbytes <= _LARGEST_BYTES and tensor.is_contiguous():
        try:
            return torch.from_numpy, (tensor.numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, quantized, with a gradient
            pass
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
