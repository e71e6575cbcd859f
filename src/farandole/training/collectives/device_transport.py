"""Run collectives on tensors of devices: through a process group of torch, or by copies through the host's memory.

A DeviceTransport leaves bytes and CPU tensors to a transport of the host. Tensors on devices take a process group, of
NCCL for CUDA (nccl_transport.py). The group is connected in the first operation on a tensor that it takes: only then
the device of each rank is known, and a job without such tensors never waits for it. A StagedTransport copies tensors to
the host and back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from farandole.errors import ConfigError
from farandole.training.collectives.connection_pair import combiner, flat_on_its_device
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import TransportOperation
from farandole.training.collectives.torch_group import GroupOperations, TorchGroup
from farandole.training.collectives.transport import Reduction, Transport, refuse_source

logger = logging.getLogger("farandole")


# Copies through the host's memory -------------------------------------------------------------------------------------
#
# CUDA tensors without NCCL take this path; the bytes on the wire are the same as for CPU tensors. The copies are
# ordinary ones, queued behind the earlier work of the tensor's current stream, and the calling thread waits for each
# of them: the result is ready when a call returns, and nothing is written after a call that raised.


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class StagedTransport:
    """A Transport (transport.py) that copies tensors on devices through the host's memory.

    Args:
        below: Moves tensors in the host's memory; close() closes it.
        is_host: Tells whether `below` takes a tensor as it is.
        reason: Why NCCL is not used, for a warning with the first tensor that is copied; empty: no warning.
    """

    def __init__(
        self, below: Transport, is_host: Callable[[torch.Tensor], bool] = is_in_host_memory, reason: str = ""
    ) -> None:
        self.rank, self.size = below.rank, below.size
        self.below, self._is_host, self._reason = below, is_host, reason
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

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
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _room_for(self, flat: torch.Tensor) -> torch.Tensor:
        """Return uninitialized memory; all operations share it, and it is as large as the largest tensor needs."""
        if self._reason:
            _warn_once("NCCL", self._reason)
            self._reason = ""
        nbytes = flat.nbytes
        if self._memory.numel() < nbytes:
            # Pinned, so that the device copies by itself, at full speed.
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=flat.is_cuda, device="cpu")
        return self._memory[:nbytes].view(flat.dtype)


_warned: set[str] = set()


def _warn_once(groups: str, why: str) -> None:
    if why not in _warned:
        _warned.add(why)
        logger.warning("tensors on devices are copied through the memory of the host; %s is not used: %s", groups, why)


# A process group of the devices ---------------------------------------------------------------------------------------


_OPERATIONS = (TransportOperation.ALL_REDUCE_ON_DEVICE, TransportOperation.BROADCAST_ON_DEVICE)
_IDENTITY_BYTES = 64


class DeviceGroups(Protocol):
    """Connects the devices of the ranks. `name` is for messages."""

    name: str

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the group takes tensors like this one."""
        ...

    def identity(self, device: torch.device) -> str:
        """Return up to 64 bytes that are equal for two ranks only if they share the device."""
        ...

    def connect(self, ring: RingTransport, device: torch.device) -> TorchGroup | str:
        """Return the group of all ranks of the ring, or, on all ranks alike, the reason why there is none.

        All ranks call it at once. Raises PeerLost and GenerationEnded.
        """
        ...


class DeviceTransport(StagedTransport):
    """A Transport (transport.py) that moves tensors on devices through a process group.

    Args:
        below: As in StagedTransport, which this is where devices cannot be connected.
        ring: The ring of `below` that connects all ranks.
        is_required: Raise ConfigError, on all ranks alike, where devices cannot be connected; otherwise log one
            warning.
    """

    def __init__(self, below: Transport, ring: RingTransport, groups: DeviceGroups, is_required: bool) -> None:
        super().__init__(below)
        self._ring, self._groups = ring, groups
        self._is_required = is_required
        self._device: torch.device | None = None  # the device that was connected, or for which it was attempted
        self._operations: GroupOperations | None = None

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        if not self._groups.takes(tensor) or tensor.numel() == 0:
            return super().all_reduce(tensor, trailer, op)
        flat = flat_on_its_device(tensor)
        combiner(op)
        operations = self._connected(flat, TransportOperation.ALL_REDUCE_ON_DEVICE, op)
        if operations is None:
            return super().all_reduce(flat, trailer, op)
        return operations.all_reduce(flat, trailer, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not self._groups.takes(tensor) or tensor.numel() == 0:
            super().broadcast(tensor, source)
            return
        refuse_source(source, self.size)
        flat = flat_on_its_device(tensor)
        operations = self._connected(flat, TransportOperation.BROADCAST_ON_DEVICE, source)
        if operations is None:
            super().broadcast(flat, source)
        else:
            operations.broadcast(flat, source)

    def abort(self, reason: str) -> None:
        super().abort(reason)  # first, so that a thread that is woken finds the reason
        operations = self._operations
        if operations is not None:
            operations.abort()

    def close(self) -> None:
        super().close()
        if self._operations is not None:
            self._operations.group.release()

    def _connected(self, flat: torch.Tensor, operation: TransportOperation, source: int) -> GroupOperations | None:
        """Return the operations of the group; None where tensors have to pass through the host."""
        if self._device is None:
            self._connect(flat, operation, source)
        elif flat.device != self._device:
            raise ValueError(
                f"the tensor is on {flat.device}, and the first tensor of this generation was on {self._device}: a "
                f"worker uses one device"
            )
        return self._operations

    def _connect(self, flat: torch.Tensor, operation: TransportOperation, source: int) -> None:
        """Connect within the first operation, so that ranks in another operation learn of the mismatch, too."""
        mine = self._groups.identity(flat.device).encode()[:_IDENTITY_BYTES].ljust(_IDENTITY_BYTES)
        header = self._ring.next_header(operation, flat, source)
        connected: TorchGroup | str = shared_devices(self._ring.exchange(header, mine))
        if not connected:
            connected = self._groups.connect(self._ring, flat.device)
        self._device = flat.device
        if not isinstance(connected, str):
            self._operations = GroupOperations(self._ring, connected, _OPERATIONS)
        elif self._is_required:
            raise ConfigError(f"--transport {self._groups.name.lower()}: {connected}; use auto")
        elif self.rank == 0:
            _warn_once(self._groups.name, connected)


def shared_devices(identities: list[bytes]) -> str:
    """Describe the ranks that share a device; empty if none do."""
    ranks: dict[bytes, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    shared = [", ".join(map(str, each)) for each in ranks.values() if len(each) > 1]
    return f"ranks {' and ranks '.join(shared)} share a device" if shared else ""
