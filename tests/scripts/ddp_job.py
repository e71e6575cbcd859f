"""Trains one model with Farandole and a copy of it with DDP on Gloo, on the same samples; says whether their
parameters have the same bits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import farandole as fd

SAMPLES, BATCH, STEPS = 160, 8, 100  # a batch of each worker; several epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", choices=["farandole", "torch"], required=True)
    parser.add_argument("--store", required=True, help="a file that does not exist yet, for DDP's group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=fd.rank(), world_size=fd.size())
    compare(options.loader)
    dist.destroy_process_group()


def compare(loader: str) -> None:
    """Train both models, and compare their parameters."""
    ours, theirs = model(), model()
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(ours.parameters(), lr=1e-3))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    # Small buckets, so that there are several: the bits must not depend on how gradients are divided.
    parallel = torch.nn.parallel.DistributedDataParallel(theirs, bucket_cap_mb=0.01)

    def train(batches: Iterator[Any]) -> None:
        for x, y in batches:
            for each, its_optimizer in ((parallel, reference), (ours, optimizer)):
                its_optimizer.zero_grad()
                F.cross_entropy(each(x), y).backward()
                its_optimizer.step()

    if loader == "torch":
        train(shares())
    else:
        with_loader(ours, optimizer, train)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)), distance(
        ours, theirs
    )
    print(f"the same bits after {STEPS} steps", flush=True)


def with_loader(ours: torch.nn.Module, optimizer: Any, train: Any) -> None:
    """The batches of Farandole's loader: both models are trained on them."""
    loader = fd.elastic.DataLoader(data(), BATCH * fd.size())
    # DDP's model is no part of the state: it would train the batch of a rehearsal.
    state = fd.elastic.TorchState(model=ours, optimizer=optimizer, loader=loader, rehearse=False)

    @fd.elastic.run
    def run(state: Any) -> None:
        for _ in loader.epochs(STEPS * BATCH * fd.size() // SAMPLES):
            train(loader)
        assert state.step == STEPS

    run(state)


def model() -> torch.nn.Module:
    """Some 20,000 parameters, one of them frozen; the same on every rank."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LayerNorm(16 * 36)]
    built = torch.nn.Sequential(*layers, torch.nn.Linear(16 * 36, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    built[-1].bias.requires_grad_(False)
    return built


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 10, (SAMPLES,), generator=generator))


def shares() -> Iterator[Any]:
    """Other samples on each rank, without a loader of Farandole."""
    x, y = data().tensors
    for step in range(STEPS):
        chosen = (torch.arange(BATCH) + BATCH * (step * fd.size() + fd.rank())) % SAMPLES
        yield x[chosen], y[chosen]


def distance(ours: torch.nn.Module, theirs: torch.nn.Module) -> str:
    far = [float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    return f"rank {fd.rank()}: parameters differ by up to {far}"


if __name__ == "__main__":
    main()
