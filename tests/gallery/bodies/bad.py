"""Bodies that break a rule: each must be refused with an error that names what is wrong, or must come out right."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
teacher = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, count=0)


def one_step(x, y, index):
    optimizer.zero_grad()
    F.mse_loss(model(x, index), y).backward()
    optimizer.step()


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        if kind == "re-enter":  # breaks out of the loop over batches, and comes back to it
            for x, y, index in loader:
                one_step(x, y, index)
                if state.step % 4 == 2:
                    break
        for x, y, index in loader:
            if kind == "one-rank":
                if fd.rank() == 0 and state.step == 3:
                    fd.mean(1.0)
                one_step(x, y, index)
            elif kind == "swallow":
                try:
                    one_step(x, y, index)
                except Exception:  # noqa: BLE001 - that is the point
                    continue
            elif kind == "swallow-collective":
                try:
                    fd.mean(1.0)
                    one_step(x, y, index)
                except Exception:  # noqa: BLE001 - that is the point
                    pass
            elif kind == "twice":
                one_step(x, y, index)
                optimizer.step()
            elif kind == "replace-grad":
                optimizer.zero_grad()
                F.mse_loss(model(x, index), y).backward()
                for parameter in model.parameters():
                    parameter.grad = parameter.grad * 0.5
                optimizer.step()
            elif kind == "requires-grad":
                model.first.requires_grad_(state.step % 2 == 0)
                one_step(x, y, index)
            elif kind == "unfreeze-late":
                one_step(x, y, index)
            elif kind == "continue":
                if state.step == 3:
                    continue
                one_step(x, y, index)
            elif kind == "fork-train":
                import os

                if state.step == 3 and os.fork() == 0:
                    one_step(x, y, index)
                    os._exit(0)
                one_step(x, y, index)
            elif kind == "no-step":
                F.mse_loss(model(x, index), y).backward()
            elif kind == "untracked":
                one_step(x, y, index)
                with torch.no_grad():
                    for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.5)
            elif kind == "re-enter":
                one_step(x, y, index)


train(state)
