"""Move tensors on other devices through a transport of the host's memory: they are copied there and back.

CUDA tensors without NCCL take this path; the bytes on the wire are the same as for CPU tensors.

The copies are ordinary ones, queued behind the earlier work of the tensor's current stream, and the calling thread
waits for each of them: the result is ready when a call returns, and nothing is written after a call that raised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.collectives.reduction import Reduction
from farandole.collectives.tensor_bytes import flat_on_its_device
from farandole.collectives.transport import Transport


def host_transport(transport: Transport) -> Transport:
    """Return the transport of tensors in the host's memory: the one below, where another layer handles devices."""
    while (below := getattr(transport, "below", None)) is not None:
        transport = below
    return transport


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class StagedTransport:
    """A Transport (transport.py) that copies tensors on devices through the host's memory.

    Args:
        below: Moves tensors in the host's memory; close() closes it.
        is_host: Tells whether `below` takes a tensor as it is.
    """

    def __init__(self, below: Transport, is_host: Callable[[torch.Tensor], bool] = is_in_host_memory) -> None:
        self.below, self._is_host = below, is_host
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def rank(self) -> int:
        return self.below.rank

    @property
    def size(self) -> int:
        return self.below.size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        if self._is_host(tensor):
            return self.below.all_reduce(tensor, trailer, op)
        flat = flat_on_its_device(tensor)
        copy = self._room_for(flat).copy_(flat)
        trailers = self.below.all_reduce(copy, trailer, op)
        flat.copy_(copy)
        return trailers

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self._is_host(tensor):
            self.below.broadcast(tensor, source)
            return
        flat = flat_on_its_device(tensor)
        copy = self._room_for(flat)
        if self.rank == source:
            copy.copy_(flat)
        self.below.broadcast(copy, source)
        if self.rank != source:
            flat.copy_(copy)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self.below.all_gather(payload)

    def barrier(self) -> None:
        self.below.barrier()

    def wait_for_peer(self, wake: int) -> bool | None:
        return self.below.wait_for_peer(wake)

    def abort(self, reason: str) -> None:
        self.below.abort(reason)

    def close(self) -> None:
        self.below.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _room_for(self, flat: torch.Tensor) -> torch.Tensor:
        """Return uninitialized memory; all operations share it, and it is as large as the largest tensor needs."""
        nbytes = flat.numel() * flat.element_size()
        if self._memory.numel() < nbytes:
            # Pinned, so that the device copies by itself, at full speed.
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=flat.is_cuda)
        return self._memory[:nbytes].view(flat.dtype)
