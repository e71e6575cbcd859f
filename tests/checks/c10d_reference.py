"""A group of torch's own Gloo beside ours, among the same ranks: what ours does is held against it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

import farandole as fd

DEVICE = torch.device("cpu")
"""That of our tensors. A script may replace it."""


@cache
def gloo() -> dist.ProcessGroup:
    """Of all ranks."""
    path = fd.broadcast_object(tempfile.mktemp(prefix="c10d-reference-"))
    store = dist.FileStore(path, fd.size())
    inner = ProcessGroupGloo(store, fd.rank(), fd.size(), timedelta(seconds=20))
    group = dist.ProcessGroup(store, fd.rank(), fd.size())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
    fd.barrier()  # all ranks have connected: the file is no longer needed
    if fd.rank() == 0:
        os.unlink(path)
    return group


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Other ones on each rank; small whole numbers, so that no order of additions rounds."""
    generator = torch.Generator().manual_seed(seed * 100 + fd.rank())
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape, generator=generator).to(dtype)


def same_as_gloo(operation: Callable[[dist.ProcessGroup, list[torch.Tensor]], object], *make: torch.Tensor) -> None:
    """`operation(group, tensors)` leaves the same in copies of the tensors, whichever group it is given."""
    ours, theirs = ([each.to(device, copy=True) for each in make] for device in (DEVICE, "cpu"))
    for group, tensors in ((dist.group.WORLD, ours), (gloo(), theirs)):
        assert group is not None
        work = operation(group, tensors)
        if work is not None:
            work.wait()  # type: ignore[attr-defined]
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == reference.dtype
        assert torch.equal(mine.cpu(), reference), f"{mine.cpu()} instead of {reference}"
