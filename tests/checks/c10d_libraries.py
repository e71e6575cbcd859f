"""Checks of the backend "farandole": what torch builds upon process groups works on it."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import farandole as fd


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)).double()


def batch() -> torch.Tensor:
    """The same on all ranks; each has a share of it."""
    return torch.randn(4 * fd.size(), 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(fd.size())[fd.rank()]


def check_bookkeeping() -> None:
    assert dist.is_initialized()
    assert dist.get_backend() == "farandole"
    assert (dist.get_rank(), dist.get_world_size()) == (fd.rank(), fd.size())
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(fd.size()))


def check_a_device_mesh() -> None:
    size = fd.size()
    line = init_device_mesh("cpu", (size,))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=line.get_group())
    assert tensor.tolist() == [float(size)] * 2
    plane = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for name, expected in (("replicate", 2.0), ("shard", float(size // 2))):
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=plane[name].get_group())
        assert tensor.tolist() == [expected] * 2
    assert plane["replicate", "shard"]._flatten("all").size() == size


def check_distributed_tensors() -> None:
    mesh = init_device_mesh("cpu", (fd.size(),))
    whole = torch.arange(24.0 * fd.size()).reshape(4 * fd.size(), 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.to_local(), mine(whole))
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    partial = (sharded.t() @ sharded).redistribute(placements=[Replicate()])
    assert isinstance(partial, DTensor)
    assert torch.allclose(partial.to_local(), whole.t() @ whole)


def check_functional_collectives() -> None:
    size, rank = fd.size(), fd.rank()
    group = dist.group.WORLD
    # Their names before torch 2.13, and today's.
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    total = sum(range(size))
    assert funcol.all_reduce(torch.tensor([float(rank)]), "sum", group).tolist() == [total]
    gathered = gather(torch.tensor([[float(rank)]]), 0, group)
    assert gathered.tolist() == [[float(each)] for each in range(size)]
    scattered = scatter(torch.arange(2.0 * size), "avg", 0, group)
    assert scattered.tolist() == [2.0 * rank, 2.0 * rank + 1]
    exchanged = funcol.all_to_all_single(torch.arange(float(size)) + 10 * rank, None, None, group)
    assert exchanged.tolist() == [10.0 * source + rank for source in range(size)]
    assert funcol.broadcast(torch.tensor([float(rank)]), 1, group).tolist() == [1.0]
    several = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(1)], "sum", group)
    assert [each.tolist() for each in several] == [[float(size)] * 2, [float(size)]]


@contextlib.contextmanager
def ignoring_deprecations() -> Iterator[None]:
    """What torch 2.13 wants to be rid of, and 2.9 does not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated", category=FutureWarning)
        yield


def check_collectives_with_gradients() -> None:
    size, rank = fd.size(), fd.rank()
    x = torch.tensor([rank + 1.0], requires_grad=True)
    with ignoring_deprecations():
        (torch.distributed.nn.functional.all_reduce(x) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [sum(range(size + 1))]
    y = torch.tensor([1.0], requires_grad=True)
    with ignoring_deprecations():
        sum(torch.distributed.nn.functional.all_gather(y)).backward()  # type: ignore[union-attr]
    assert y.grad is not None
    assert y.grad.tolist() == [float(size)]


def check_distributed_data_parallel() -> None:
    alone, together = model(), model()
    wrapped = torch.nn.parallel.DistributedDataParallel(together)
    alone(batch()).square().mean().backward()
    wrapped(mine(batch())).square().mean().backward()
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)


def check_fully_sharded() -> None:
    compare_with_one_process(init_device_mesh("cpu", (fd.size(),)))


def check_hybrid_sharded() -> None:
    """Replicated over two, sharded over the others."""
    compare_with_one_process(init_device_mesh("cpu", (2, fd.size() // 2), mesh_dim_names=("replicate", "shard")))


def compare_with_one_process(mesh: DeviceMesh) -> None:
    """Three steps of FSDP2 are those of one process on the whole batch."""
    alone = model()
    sharded = copy.deepcopy(alone)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, foreach=False) for each in (alone, sharded)]
    for _ in range(3):
        for each, x, optimizer in ((alone, batch(), optimizers[0]), (sharded, mine(batch()), optimizers[1])):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), sharded.parameters(), strict=True):
        assert isinstance(other, DTensor)
        assert torch.allclose(one, other.full_tensor(), rtol=0, atol=1e-10)


def check_a_distributed_checkpoint() -> None:
    folder = fd.broadcast_object(tempfile.mkdtemp(prefix="dcp-") if fd.rank() == 0 else None)
    mesh = init_device_mesh("cpu", (fd.size(),))
    whole = torch.arange(12.0 * fd.size()).reshape(2 * fd.size(), 6)
    dcp.save({"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "same": torch.ones(3)}, checkpoint_id=folder)
    loaded = {"sharded": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "same": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["sharded"].full_tensor(), whole)  # type: ignore[attr-defined]
    assert loaded["same"].tolist() == [1.0] * 3
    dist.barrier()
    if fd.rank() == 0:
        shutil.rmtree(folder)


def check_a_distributed_checkpoint_in_the_background() -> None:
    folder = fd.broadcast_object(tempfile.mkdtemp(prefix="dcp-") if fd.rank() == 0 else None)
    group = dist.new_group()
    mesh = init_device_mesh("cpu", (fd.size(),))
    sharded = distribute_tensor(torch.ones(2 * fd.size(), 6), mesh, [Shard(0)])
    saved = dcp.async_save({"sharded": sharded}, checkpoint_id=folder, process_group=group)
    for _ in range(100):
        dist.all_reduce(torch.ones(1000))  # training goes on
    saved.result(timeout=15)
    loaded = {"sharded": distribute_tensor(torch.zeros(2 * fd.size(), 6), mesh, [Shard(0)])}
    dcp.load(loaded, checkpoint_id=folder)
    assert loaded["sharded"].full_tensor().unique().tolist() == [1.0]
    dist.barrier()
    if fd.rank() == 0:
        shutil.rmtree(folder)


def check_destroyed_and_initialized_again() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("farandole")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == fd.size()
