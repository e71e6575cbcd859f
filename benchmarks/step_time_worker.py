"""One worker of the step time benchmark: the same model with DDP on Gloo and with Farandole, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import farandole as fd


def mlp() -> torch.nn.Module:
    """0.7 M parameters in 3 layers."""
    return torch.nn.Sequential(
        torch.nn.Linear(784, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )


def deep() -> torch.nn.Module:
    """25 M parameters in 50 layers."""
    layers = [m for _ in range(50) for m in (torch.nn.Linear(707, 707), torch.nn.ReLU())]
    return torch.nn.Sequential(torch.nn.Linear(784, 707), *layers, torch.nn.Linear(707, 10))


MODELS = {"mlp": (mlp, 64, 20), "deep": (deep, 64, 4)}  # builder, batch of a worker, steps in a turn


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Callable[[], None]:
    x, y = torch.randn(batch, 784), torch.randint(0, 10, (batch,))

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="a free port for DDP's store")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    build, batch, steps = MODELS[options.model]

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = build()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=fd.rank(), world_size=fd.size())
    model, optimizer = made()
    ours = one_step(model, fd.DistributedOptimizer(optimizer), batch)
    model, optimizer = made()
    ddp = one_step(torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer, batch)
    alone = one_step(*made(), batch)
    ways = {"farandole": ours, "ddp": ddp, "no communication": alone}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.turns + 1):
        for name, run in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                run()
            if turn:  # the first turn warms up
                times[name].append((time.perf_counter() - begin) / steps * 1e3)
    if fd.rank() == 0:
        ratios = [a / b for a, b in zip(times["farandole"], times["ddp"], strict=True)]
        medians = {f"{name} ms": round(statistics.median(each), 2) for name, each in times.items()}
        print("RESULT " + json.dumps({**medians, "ratio": round(statistics.median(ratios), 3)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
