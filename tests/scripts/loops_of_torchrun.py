"""Loops of scripts for torchrun, in float64: some of them cannot follow the membership, as shows only while they train.
Nothing of Farandole."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from script_of_torchrun import Table
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (as people write it)
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

Batch = list[torch.Tensor]
Train = Callable[..., None]


def two_phases(train: Train, first: DataLoader, second: DataLoader, epochs: int) -> None:
    for loader in (first, second):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                train(epoch, batch)


def alternating(train: Train, first: DataLoader, second: DataLoader, epochs: int) -> None:
    for epoch in range(epochs):
        for loader in (first, second):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                train(epoch, batch)


def zipped(train: Train, first: DataLoader, second: DataLoader, epochs: int) -> None:
    for epoch in range(epochs):
        first.sampler.set_epoch(epoch)
        second.sampler.set_epoch(epoch)
        for one, other in zip(first, second, strict=False):
            train(epoch, one, other)


def by_turns(train: Train, first: DataLoader, second: DataLoader, epochs: int) -> None:
    """Take some batches of one loader, then some of the other, of iterators that live on."""
    batches = {loader: iter(loader) for loader in (first, second)}
    for turn in range(2 * epochs):
        loader = (first, second)[turn % 2]
        for _ in range(3):
            try:
                batch = next(batches[loader])
            except StopIteration:
                batches[loader] = iter(loader)
                batch = next(batches[loader])
            train(turn, batch)


def counted(train: Train, first: DataLoader, _: DataLoader, epochs: int) -> None:
    for epoch in range(epochs):
        first.sampler.set_epoch(epoch)
        batches = iter(first)
        for _number in range(len(first)):
            train(epoch, next(batches))


def accumulated(train: Train, first: DataLoader, _: DataLoader, epochs: int) -> None:
    """Count the batches, and add up the gradients of two for each step."""
    for epoch in range(epochs):
        first.sampler.set_epoch(epoch)
        batches = iter(first)
        for number in range(len(first)):
            train(epoch, next(batches), steps=number % 2 == 1)


def looked_through(train: Train, first: DataLoader, _: DataLoader, epochs: int) -> None:
    mean = torch.stack([x.mean() for x, _ in first]).mean().item()
    for epoch in range(epochs):
        first.sampler.set_epoch(epoch)
        for batch in first:
            train(epoch, batch, factor=1 + mean)


def cycled(train: Train, first: DataLoader, _: DataLoader, epochs: int) -> None:
    for number, batch in enumerate(itertools.cycle(first)):
        if number == epochs * len(first):
            break
        train(number // len(first), batch)


def generated(train: Train, first: DataLoader, _: DataLoader, epochs: int) -> None:
    def logged(loader: DataLoader) -> Iterator[tuple[int, Batch]]:
        yield from enumerate(loader)

    for epoch in range(epochs):
        first.sampler.set_epoch(epoch)
        for _number, batch in logged(first):
            train(epoch, batch)


class Prefetcher:
    """Takes batches until there are none, ahead of nothing: batches of the first loader are asked for in time."""

    def __init__(self, loader: DataLoader) -> None:
        self._batches = iter(loader)

    def next(self) -> Batch | None:
        try:
            return next(self._batches)
        except StopIteration:
            return None


def prefetched(train: Train, first: DataLoader, _: DataLoader, epochs: int) -> None:
    for epoch in range(epochs):
        first.sampler.set_epoch(epoch)
        prefetcher = Prefetcher(first)
        while (batch := prefetcher.next()) is not None:
            train(epoch, batch)


LOOPS = {
    each.__name__: each
    for each in (
        two_phases,
        alternating,
        zipped,
        by_turns,
        counted,
        accumulated,
        looked_through,
        cycled,
        generated,
        prefetched,
    )
}


def own_rows(z: torch.Tensor) -> torch.Tensor:
    """The rows of all workers, with gradients of the own ones, as contrastive losses have them."""
    gathered = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    with torch.no_grad():
        dist.all_gather(gathered, z)
    gathered[dist.get_rank()] = z
    return torch.cat(gathered)


class WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        gathered = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, z)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        gradients = gradients.clone()
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]


def whole_rows(z: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = WholeRows.apply(z)
    return rows


def wait_for_second_loop(folder: Path) -> None:
    """Wait until another worker has trained a batch of the second table. Raises TimeoutError."""
    deadline = time.monotonic() + 60
    while not any('"table": 1' in each.read_text() for each in folder.glob("log-*.jsonl")):
        if time.monotonic() > deadline:
            raise TimeoutError("no worker has reached the second loop")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loops", nargs="+", choices=LOOPS, metavar="LOOP", help="each trains a model of its own")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds for each batch")
    parser.add_argument("--reduce", choices=("loss", "copy", "rows", "whole"), help="over all workers, in each batch")
    parser.add_argument("--weights", action="store_true", help="the loss is a mean over the weights of classes")
    parser.add_argument("--late", action="store_true", help="workers beyond three wait for the second loop")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    if options.late and int(os.environ["FARANDOLE_WORKER"].removeprefix("w")) > 2:
        wait_for_second_loop(options.folder)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for loop in options.loops:
        run(loop, options)
    dist.destroy_process_group()


def run(loop: str, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tables = [Table(samples, seed) for samples, seed in ((144, 1), (120, 2))]
    first, second = (DataLoader(each, options.batch_size, sampler=DistributedSampler(each)) for each in tables)
    log = (options.folder / f"log-{os.getpid()}.jsonl").open("a", buffering=1)

    def tell(**values: Any) -> None:
        log.write(json.dumps({"time": time.time(), "pid": os.getpid(), "size": dist.get_world_size(), **values}) + "\n")

    def train(epoch: int, *batches: Batch, steps: bool = True, factor: float = 1.0) -> None:
        weights = torch.arange(1.0, 5.0, dtype=torch.float64) if options.weights else None
        loss = factor * sum(F.cross_entropy(model(x), y, weights) for x, y in batches)
        if options.reduce in ("rows", "whole"):
            rows = (own_rows if options.reduce == "rows" else whole_rows)(model(batches[0][0]))
            loss = loss + rows.square().mean()
        elif options.reduce:
            total = loss.clone()
            dist.all_reduce(total)
            if options.reduce == "loss":
                loss = total / dist.get_world_size()
        loss.backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
        table = next(number for number, each in enumerate(tables) if (each.x == batches[0][0][0]).all(1).any())
        tell(at="batch", epoch=epoch, table=table, samples=len(batches[0][0]), rank=dist.get_rank())
        time.sleep(options.pause)

    tell(at="begin", epoch=-1, rank=dist.get_rank())
    LOOPS[loop](train, first, second, options.epochs)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    tell(at="over", loop=loop, digest=hashlib.sha256(weights.numpy().tobytes()).hexdigest(), lr=0.05)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), options.folder / "final.pt")


if __name__ == "__main__":
    main()
