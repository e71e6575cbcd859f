"""Build a process group of NCCL from a ring: the operations on CUDA devices for device_transport.py."""

from __future__ import annotations

import torch

from farandole.collectives.nccl.nccl_group import NcclGroup
from farandole.collectives.ring import RingTransport
from farandole.collectives.torch_groups.construction import Construction
from farandole.collectives.torch_groups.ring_store import ExchangedStore
from farandole.env import prepare_for_nccl

_CONNECT_TIMEOUT_S = 60.0


class NcclGroups:
    """The DeviceGroups (device_transport.py) of CUDA devices."""

    name = "NCCL"

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def identity(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def connect(self, ring: RingTransport, device: torch.device) -> NcclGroup | str:
        wrong = prepare_for_nccl()

        def make(store: ExchangedStore) -> NcclGroup:
            if wrong:
                raise RuntimeError(wrong)
            return NcclGroup(store, ring.rank, ring.size, device)

        return Construction(ring, make, NcclGroup.connect, NcclGroup.release, _CONNECT_TIMEOUT_S, "nccl").finish()
