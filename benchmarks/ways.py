"""The ways to make a training step that are compared with each other: each builds the same model and trains it.

Farandole is imported by those ways that use it only: what a process of plain torch needs is measured, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models import Task

Step = Callable[[], None]

# A process has one of farandole, horovod and elastic_ddp: outside of its loader's batches, Farandole's is an open step.
WAYS = {
    "farandole": "Farandole with its loader",
    "with_loader": "the same with state.commit() in every step",
    "horovod": "Farandole as Horovod is used, with torch's loader",
    "commit": "the same with state.commit() in every step",
    "promised": "the same with commit_follows_step=True",
    "elastic_ddp": "DDP in an elastic function, with Farandole's loader",
    "ddp": "DDP on Gloo, set up to be as fast as it gets",
    "plain_ddp": "DDP on Gloo, as it comes",
    "none": "no communication",
    "one": "one process, while the others wait",
}

COMMITS = {"with_loader": "its loader", "promised": "commit_follows_step", "commit": "a copy in the background"}


def made(task: Task) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same model in all ways and on all ranks."""
    torch.manual_seed(0)
    model = task.build()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def ddp(task: Task) -> Step:
    """As fast as DDP gets: gradients are views of its buckets, and buffers are not sent before each step, which
    Farandole does not do either."""
    model, optimizer = made(task)
    return step(task, wrapped(model), optimizer, batches(task, dist.get_rank(), dist.get_world_size()))


def plain_ddp(task: Task) -> Step:
    """DistributedDataParallel(model), as most scripts have it."""
    model, optimizer = made(task)
    wrap = torch.nn.parallel.DistributedDataParallel
    return step(task, wrap(model), optimizer, batches(task, dist.get_rank(), dist.get_world_size()))


def wrapped(model: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
    wrap = torch.nn.parallel.DistributedDataParallel
    has_new_name = "forward_sync_buffers" in inspect.signature(wrap).parameters
    silent = {"forward_sync_buffers" if has_new_name else "broadcast_buffers": False}
    return wrap(model, gradient_as_bucket_view=True, **silent, **arguments)


def none(task: Task) -> Step:
    return step(task, *made(task), batches(task, dist.get_rank(), dist.get_world_size()))


def one(task: Task) -> Step:
    return none(task) if dist.get_rank() == 0 else lambda: None


def horovod(task: Task, commit_follows_step: bool = False) -> tuple[Step, Any]:
    """The step, and the state to give to the elastic function."""
    import farandole as fd

    model, optimizer = made(task)
    distributed = fd.DistributedOptimizer(optimizer, model.named_parameters())
    state = fd.elastic.TorchState(model, distributed, commit_follows_step=commit_follows_step)
    return step(task, model, distributed, batches(task, fd.rank(), fd.size())), state


def farandole(task: Task) -> tuple[Step, Any]:
    """The step, and the state to give to the elastic function."""
    import farandole as fd

    model, optimizer = made(task)
    return with_loader(task, model, fd.DistributedOptimizer(optimizer))


def elastic_ddp(task: Task) -> tuple[Step, Any]:
    """As farandole(); the default group of the process is Gloo's, for DDP on that."""
    from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
    from farandole.integrations.torchrun.process_group.works import Everybody

    model, optimizer = made(task)
    return with_loader(task, wrapped(model, process_group=FarandoleGroup(Everybody())), optimizer)


def with_loader(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    import farandole as fd

    loader = fd.elastic.DataLoader(task.data(), task.batch * fd.size(), tail="drop")
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    def endless() -> Iterator[Any]:
        for _ in loader.epochs(1_000_000):
            yield from loader

    return step(task, model, optimizer, endless()), state


def step(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Any]) -> Step:
    """From the loader to the changed parameters."""

    def run() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        task.loss(model, x, y).backward()
        optimizer.step()

    return run


def batches(task: Task, rank: int, size: int) -> Iterator[Any]:
    """Of torch's loader, without end."""
    data = task.data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank, drop_last=True)
    loader = DataLoader(data, task.batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
