"""An elastic job that prints a mean over its workers in each step, in which one of them may be lost."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dies", type=Path, help="the process whose number is in this file is lost in a mean")
    parser.add_argument("--stop", type=Path, help="end after the epoch in which this file is there")
    parser.add_argument("--records")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    x = torch.linspace(-1, 1, 240).reshape(60, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = fd.elastic.DataLoader(dataset, global_batch_size=6, seed=0)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(1_000_000):
            for x, y in loader:
                records.before_step(state)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if optimizer.step():
                    records.after_step(state)
                    if options.dies.exists() and options.dies.read_text() == str(os.getpid()):
                        os.kill(os.getpid(), signal.SIGKILL)
                    mean = fd.mean(float(os.getpid()))
                    print(f"process {os.getpid()} step {state.step} mean {mean:.6f}", flush=True)
            if fd.any(options.stop.exists()):
                break

    train(state)
    records.at_end(state)


if __name__ == "__main__":
    main()
