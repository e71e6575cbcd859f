"""Automatic mixed precision, in the recipes of torch's tutorial."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scaler=scaler)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind in ("autocast", "bfloat16")):
                loss = F.mse_loss(model(x, index), y)
            if kind == "bfloat16":
                loss.backward()
                optimizer.step()
                continue
            if kind == "inf" and state.step % 5 == 2 and scaler.get_scale() > 1000:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if kind in ("unscale", "if-unscale"):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if kind.startswith("if"):
                if scaler.step(optimizer):
                    scaler.update()
            else:
                scaler.step(optimizer)
                scaler.update()
    return state.step


train(state)
