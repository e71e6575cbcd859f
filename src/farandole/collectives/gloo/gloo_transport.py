"""Run all collectives with tensors through torch's Gloo, as a reference. Bytes go around the ring."""

from __future__ import annotations

import torch

from farandole.collectives.gloo.gloo_group import GlooGroup
from farandole.collectives.reduction import Reduction
from farandole.collectives.ring import RingTransport
from farandole.collectives.tensor_bytes import combiner, flat_view
from farandole.collectives.torch_groups.group_operations import GroupOperations


class GlooTransport:
    """A Transport (transport.py) that moves tensors through Gloo.

    Args:
        ring: Connects all ranks in the same order; close() closes it.
        group: The group of the same ranks; close() releases it, in the background.
    """

    def __init__(self, ring: RingTransport, group: GlooGroup) -> None:
        self._ring, self._group = ring, group
        self._operations = GroupOperations(ring, group)

    @property
    def rank(self) -> int:
        return self._ring.rank

    @property
    def size(self) -> int:
        return self._ring.size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat = flat_view(tensor)
        combiner(op)
        if flat.numel() == 0:
            return self._ring.all_reduce(flat, trailer, op)
        return self._operations.all_reduce(flat, trailer, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self.size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self.size - 1}, got {source}")
        flat = flat_view(tensor)
        if flat.numel() == 0:
            self._ring.broadcast(flat, source)
            return
        self._operations.broadcast(flat, source)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._ring.all_gather(payload)

    def barrier(self) -> None:
        self._ring.barrier()

    def wait_for_peer(self, wake: int) -> bool | None:
        return self._ring.wait_for_peer(wake)

    def abort(self, reason: str) -> None:
        self._ring.abort(reason)
        self._operations.abort()

    def close(self) -> None:
        """Close the transport; no collective may run. Later calls raise GenerationEnded."""
        self._ring.close()
        self._group.release()
