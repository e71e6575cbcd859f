"""Checks of the backend "farandole" with tensors that are not in the memory of the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

import farandole as fd
from tests.checks import c10d_reference
from tests.checks.c10d_reference import same_as_gloo, values

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
SHAPES = [(), (5,), (3, 4), (40_000,)]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(c10d_reference.DEVICE)


def full(value: float, *shape: int) -> torch.Tensor:
    return on_device(torch.full(shape, float(value)))


def check_all_reduce_reduce_and_broadcast() -> None:
    reducing, giving = AllreduceOptions(), BroadcastOptions()
    reducing.reduceOp, giving.rootRank = dist.ReduceOp.MAX, fd.size() - 1
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = values(shape, dtype)
            same_as_gloo(lambda group, some: group.allreduce(some), tensor)
            same_as_gloo(lambda group, some: group.allreduce(some, reducing), tensor)
            same_as_gloo(lambda group, some: group.broadcast(some, giving), tensor)
    mine, whole = values((7,), torch.float32), values((7,), torch.float32)
    dist.all_reduce(whole)
    reduced = on_device(mine)
    dist.reduce(reduced, 0)
    assert torch.equal(reduced.cpu(), whole if fd.rank() == 0 else mine)


def check_means_and_bits() -> None:
    size, rank = fd.size(), fd.rank()
    mean = full(rank, 3)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.cpu().tolist() == [(size - 1) / 2] * 3
    bits = on_device(torch.tensor([1 << rank]))
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.cpu().tolist() == [2**size - 1]


def check_gathers_and_scatters() -> None:
    size, is_root = fd.size(), fd.rank() == 0
    gathering, scattering = GatherOptions(), ScatterOptions()
    for shape in ((3, 2), (30_000,)):
        slots = [torch.zeros(shape) for _ in range(size)]
        own, parts = values(shape, torch.float32), [values(shape, torch.float32, seed=part) for part in range(size)]
        same_as_gloo(lambda group, some: group.allgather([some[1:]], [some[0]]), own, *slots)
        gathered = slots if is_root else []
        same_as_gloo(
            lambda group, some: group.gather([some[1:]] if is_root else [], some[:1], gathering), own, *gathered
        )
        given = parts if is_root else []
        same_as_gloo(
            lambda group, some: group.scatter(some[:1], [some[1:]] if is_root else [], scattering), slots[0], *given
        )


def check_all_to_all_and_reduce_scatter() -> None:
    size, rank = fd.size(), fd.rank()
    for rows in (1, 5_000):
        same_as_gloo(
            lambda group, some: group.alltoall_base(some[1], some[0], [], [], AllToAllOptions()),
            values((size * rows, 3), torch.int64),
            torch.zeros(size * rows, 3, dtype=torch.int64),
        )
    sent = [full(10.0 * rank + to, to + 1) for to in range(size)]
    received = [full(0.0, rank + 1) for _ in range(size)]
    dist.all_to_all(received, sent)
    assert [each.cpu().tolist() for each in received] == [[10.0 * other + rank] * (rank + 1) for other in range(size)]
    output = full(0.0, 2, 3)
    given = [full(part + rank, 2, 3) for part in range(size)]
    dist.group.WORLD.reduce_scatter([output], [given], ReduceScatterOptions())
    assert output.cpu().unique().tolist() == [size * rank + sum(range(size))]


def check_messages() -> None:
    size, rank = fd.size(), fd.rank()
    dist.send(full(rank, 5), (rank + 1) % size)
    arrived = full(0.0, 5)
    assert dist.recv(arrived, (rank - 1) % size) == (rank - 1) % size
    assert arrived.cpu().tolist() == [(rank - 1) % size] * 5


def check_a_subgroup() -> None:
    """Its operations pass through the memory of the host even where those of all ranks would not."""
    members = [0, 1]
    group = dist.new_group(members)
    if fd.rank() in members:
        tensor = full(fd.rank() + 1.0, 70_000)
        dist.all_reduce(tensor, group=group)
        assert tensor.cpu().unique().tolist() == [3.0]
        dist.broadcast(tensor.copy_(torch.full((70_000,), float(fd.rank()))), 1, group=group)
        assert tensor.cpu().unique().tolist() == [1.0]


def check_tensors_without_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="moves dense tensors"):
        dist.group.WORLD.allreduce([torch.empty(2, device="meta")])
