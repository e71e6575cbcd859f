"""One worker leaves the training by itself, while the others train on. Words: the rule, and how it leaves."""

from __future__ import annotations

import sys

import torch

import farandole as fd

RULE, WAY = sys.argv[1:]

fd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def step(x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


@fd.elastic.run
def by_steps(state: fd.elastic.TorchState) -> None:
    for _ in state.loader.epochs(2):
        for (x,) in state.loader:
            if state.step == 5 and fd.rank() == 1:
                if WAY == "return":
                    return
                break
            step(x)


@fd.elastic.run
def by_commits(state: fd.elastic.TorchState) -> None:
    while state.batch < 20:
        if state.batch == 5 and fd.rank() == 1:
            return
        step(torch.ones(2, 4))
        state.batch += 1
        state.commit()


if RULE == "step":
    data = torch.utils.data.TensorDataset(torch.randn(96, 4))
    loader = fd.elastic.DataLoader(data, 8, seed=0)
    by_steps(fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader))
else:
    by_commits(fd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
