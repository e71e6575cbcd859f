"""A small elastic job with another order and tail than usual, and an evaluation behind each epoch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import farandole as fd
from farandole.testing.quick_start import without_compiler

SAMPLES, EVALUATED, EPOCHS = 130, 41, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=Path, required=True, help="a folder")
    parser.add_argument("--exits", action="store_true", help="rank 1, once while it trains and once while it evaluates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    model = torch.nn.Linear(1, 1).double()
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    values = torch.arange(float(SAMPLES), dtype=torch.float64)[:, None] / SAMPLES
    loader = fd.elastic.DataLoader(
        values, 12, order=fd.elastic.Stratified(torch.arange(SAMPLES) % 3), tail="carry", seed=5
    )
    evaluation = fd.elastic.EvalLoader(range(EVALUATED), 4, num_workers=1)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    def exit_once(where: str, epoch: int) -> None:
        flag = options.records / f"has-exited-in-{where}"
        if options.exits and loader.epoch == epoch and fd.rank() == 1 and not flag.exists():
            flag.touch()
            os._exit(7)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for epoch in loader.epochs(EPOCHS):
            for x in loader:
                exit_once("training", 1)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            total = 0
            for batch in evaluation:
                exit_once("evaluation", 2)
                total += int(batch.sum())
            mean = fd.mean(total / max(1, evaluation.samples), weight=evaluation.samples)
            if fd.rank() == 0:
                print(f"epoch {epoch} mean {mean:.9f}", flush=True)

    train(state)
    weight, bias = model.weight.item(), model.bias.item()
    print(f"end {state.step} {loader.epoch} {loader.cursor} {weight:.12f} {bias:.12f}", flush=True)
    evaluation.close()


if __name__ == "__main__":
    main()
