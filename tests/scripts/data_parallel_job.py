"""Trains a model whose workers have several threads each, and a copy on the whole batch of every step; says how far
apart they end."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import farandole as fd
from farandole.testing.quick_start import without_compiler

SAMPLES, BATCH, EPOCHS = 105, 10, 5  # the last batch of an epoch has five samples, over all workers
STEPS = -(-SAMPLES // BATCH) * EPOCHS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["loader", "horovod", "ddp"], required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="of each rank; 0: the plain module")
    parser.add_argument("--store", help="a file that does not exist yet, for DDP's group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way != "ddp":  # which needs it
        without_compiler()
    fd.init()
    reference = model()
    threads = options.threads[fd.rank() % len(options.threads)]
    ours: torch.nn.Module = copy.deepcopy(reference)
    if threads:
        ours = fd.DataParallel(ours, threads=threads)
    if options.way == "loader":
        train_with_loader(ours)
        train_alone(reference)
    else:
        train_shares(ours, reference, options)
    apart = max((a - b).abs().max().item() for a, b in zip(ours.parameters(), reference.parameters(), strict=True))
    assert apart < 1e-10, apart
    assert ours.unused.weight.grad is None or ours.unused.weight.grad.abs().sum() == 0
    print(f"rank {fd.rank()} of {fd.size()}: the same after {STEPS} steps", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def train_with_loader(ours: torch.nn.Module) -> None:
    """The optimizer of Farandole, with its loader: micro-batches, shares and dummy batches as they come."""
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(ours.parameters(), lr=0.01))
    loader = fd.elastic.DataLoader(data(), BATCH, micro_batch_size=3, shuffle=False)
    state = fd.elastic.TorchState(model=ours, optimizer=optimizer, loader=loader)

    @fd.elastic.run
    def run(state: Any) -> None:
        for _ in loader.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(ours(x), y).backward()
                optimizer.step()

    run(state)
    assert state.step == STEPS


def train_alone(reference: torch.nn.Module) -> None:
    """All samples of each step at once, in the loader's order."""
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    x, y = data().tensors
    for _ in range(EPOCHS):
        for low in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(reference(x[low : low + BATCH]), y[low : low + BATCH]).backward()
            reference.unused.weight.grad = torch.zeros_like(reference.unused.weight)  # as all have one with the loader
            optimizer.step()


def train_shares(ours: torch.nn.Module, reference: torch.nn.Module, options: argparse.Namespace) -> None:
    """Each rank a part of the same size: DDP, or Farandole's optimizer as Horovod's is used."""
    x, y = data().tensors
    step = torch.optim.AdamW(ours.parameters(), lr=0.01)
    if options.way == "ddp":
        dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=fd.rank(), world_size=fd.size())
        wrapped: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(ours, find_unused_parameters=True)
    else:
        wrapped, step = ours, fd.DistributedOptimizer(step, named_parameters=ours.named_parameters())
    alone = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for number in range(STEPS):
        chosen = torch.arange(number, number + 2 * (1 + number % 4) * fd.size()) % SAMPLES
        mine = chosen[fd.rank() :: fd.size()]
        for module, optimizer, samples in ((wrapped, step, mine), (reference, alone, chosen)):
            optimizer.zero_grad()
            F.cross_entropy(module(x[samples]), y[samples]).backward()
            if options.way == "horovod" and optimizer is alone:
                reference.unused.weight.grad = torch.zeros_like(reference.unused.weight)
            optimizer.step()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.unused = torch.nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Model().double()


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


if __name__ == "__main__":
    main()
