"""A job for launchers of fixed size: its rank 0 may die at a step; at the end it says which samples were trained."""

from __future__ import annotations

import argparse
import os

import torch

import farandole as fd
from farandole.testing.quick_start import without_compiler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.arange(300.0).view(-1, 1))
    loader = fd.elastic.DataLoader(data, global_batch_size=4)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, cursors=[])

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(2):
            for (x,) in loader:
                if state.step == options.die_at and fd.rank() == 0:
                    os._exit(3)
                optimizer.zero_grad()
                (model(x) / 300).square().mean().backward()
                if optimizer.step():
                    state.cursors = [*state.cursors, (loader.epoch, loader.cursor)]

    train(state)
    bounds = [(epoch, 4 * k) for epoch in range(2) for k in range(1, 76)]
    assert state.cursors == bounds, f"not every batch was trained once: {state.cursors}"
    print(f"RESULT rank={fd.rank()} steps={state.step}\n", end="", flush=True)  # in one write


if __name__ == "__main__":
    main()
