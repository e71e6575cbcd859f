"""A script for torchrun as people write it, in float64, with nothing of Farandole: DistributedSampler, DDP, a scheduler
for each epoch, validation with collectives, a checkpoint of rank 0. Some arguments are for tests: they make it slow
enough to be disturbed, and have it print what it did."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (as people write it)
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Table(Dataset):
    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 16, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, 4, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def evaluate(model: DDP, loader: DataLoader, group: dist.ProcessGroup, pause_s: float) -> float:
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            time.sleep(pause_s)
            counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)], dtype=torch.float64)
    dist.all_reduce(counts, group=group)
    model.train()
    return float(counts[0] / counts[1])


def wait_for_newcomer(folder: Path, logs: int) -> None:
    """Give a newcomer time to join, whose start takes longer than all epochs where the machine is busy."""
    while len([path for path in folder.glob("log-*.jsonl") if path.stat().st_size]) < logs:
        time.sleep(0.05)
    time.sleep(1.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--anew", action="store_true", help="a new DataLoader for each epoch, with a batch sampler")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--reduce-every", type=int, default=0, help="batches between two collectives in the loop")
    parser.add_argument("--slow-rank", type=int, default=-1, help="sleeps longer before each batch")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds for each batch")
    parser.add_argument("--hold", type=Path, help="workers that it names wait after a batch")
    parser.add_argument("--until-logs", type=int, default=0, help="the last epoch waits for so many workers")
    parser.add_argument("--until-size", type=int, default=0, help="and is slow until the world has this size")
    parser.add_argument("--pause-validation", type=float, default=0.0)
    parser.add_argument("--pause-between", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(24) if options.norm else torch.nn.Identity()
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), norm, torch.nn.Tanh(), torch.nn.Linear(24, 4)).double()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.amp)
    train, test = Table(options.samples, 1), Table(50, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, options.batch_size, sampler=sampler, num_workers=options.workers)
    test_loader = DataLoader(test, 8, sampler=DistributedSampler(test, shuffle=False))
    log = (options.folder / f"log-{os.getpid()}.jsonl").open("a", buffering=1)
    worker = os.environ.get("FARANDOLE_WORKER")  # its name, where Farandole has started it

    def tell(**values: object) -> None:
        log.write(json.dumps({"time": time.time(), "pid": os.getpid(), "worker": worker, **values}) + "\n")

    best = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        if options.anew:
            loader = DataLoader(train, batch_sampler=BatchSampler(sampler, options.batch_size, drop_last=True))
        for number, (x, y) in enumerate(loader):
            is_last = (number + 1) % options.accumulate == 0
            with nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(x), y) / options.accumulate
                scaler.scale(loss).backward()
            if is_last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            tell(at="batch", epoch=epoch, number=number, samples=len(x), loss=loss.item(), rank=dist.get_rank())
            if options.reduce_every and number % options.reduce_every == 0:
                dist.all_reduce(torch.ones(3))
            time.sleep(options.pause * (4 if rank == options.slow_rank else 1))
            while options.hold is not None and str(os.getpid()) in options.hold.read_text().split():
                time.sleep(0.01)
            if epoch == options.epochs - 1 and dist.get_world_size() < options.until_size:
                wait_for_newcomer(options.folder, options.until_logs)
        tell(at="end", epoch=epoch, loss=loss.item())
        time.sleep(options.pause_between)
        accuracy = evaluate(model, test_loader, group, options.pause_validation)
        best = max(best, accuracy)
        scheduler.step()
        tell(at="epoch", epoch=epoch, accuracy=accuracy, lr=optimizer.param_groups[0]["lr"], rank=dist.get_rank())
        if rank == 0:
            torch.save(model.module.state_dict(), options.folder / "checkpoint.pt")
        dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    tell(at="over", digest=digest, best=best, size=dist.get_world_size(), lr=optimizer.param_groups[0]["lr"])
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), options.folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
