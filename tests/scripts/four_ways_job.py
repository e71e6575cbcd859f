"""Trains one small network on the CPU in one of the ways that go over several processes, for comparing the parameters
with those of one process (tests/integration/test_four_ways.py)."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records

SAMPLES, BATCH, EPOCHS, SEED, LR, MOMENTUM = 210, 25, 12, 3, 0.05, 0.9


def network() -> torch.nn.Module:
    """float64; no BatchNorm and no dropout, which see one worker's part of a batch."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 8 * 8, 10),
    ).double()


def digits() -> TensorDataset:
    """Pictures of 8 x 8 in 10 classes: one for each class, and noise on every copy."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    pictures = torch.randn(10, 1, 8, 8, dtype=torch.float64, generator=generator)[labels]
    return TensorDataset(pictures + torch.randn(pictures.shape, dtype=torch.float64, generator=generator), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["ddp", "optimizer"], required=True)
    parser.add_argument("--slow-below", type=int, default=0, help="take more and more time below this generation")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_compiler()
    fd.init()

    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    if options.way == "ddp":
        torch.distributed.init_process_group("farandole")
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = fd.DistributedOptimizer(optimizer)
    loader = fd.elastic.DataLoader(digits(), global_batch_size=BATCH, seed=SEED)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(EPOCHS):
            for x, y in loader:
                records.before_step(state)
                time.sleep(0.05 * 1.1**state.step if fd.generation() < options.slow_below else 0)
                step = state.step
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if state.step > step:
                    records.after_step(state)

    train(state)
    if fd.rank() == 0:
        torch.save([parameter.detach() for parameter in model.parameters()], options.result)


if __name__ == "__main__":
    main()
