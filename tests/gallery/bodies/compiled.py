"""A compiled model."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
compiled = torch.compile(model, backend="aot_eager" if kind == "eager" else "inductor", dynamic=True)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, _ in loader:
            optimizer.zero_grad()
            F.mse_loss(compiled(x), y).backward()
            optimizer.step()


train(state)
