"""The loop of the README, and what people put around it."""

import itertools
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
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, count=0, history=[])


def batches():
    if kind == "enumerate":
        return enumerate(loader)
    if kind == "zip":
        return zip(itertools.count(), loader)
    if kind == "zip-first":
        return ((number, batch) for batch, number in zip(loader, itertools.count()))
    if kind == "tqdm":
        import tqdm

        return enumerate(tqdm.tqdm(loader, disable=fd.rank() != 0, file=sys.stdout))
    if kind == "chain":
        return enumerate(itertools.chain(loader))
    return ((None, batch) for batch in loader)


@fd.elastic.run
def train(state):
    for epoch in loader.epochs(EPOCHS):
        model.train()
        total = 0.0
        for _, (x, y, index) in batches():
            optimizer.zero_grad(set_to_none=kind == "none")
            loss = F.mse_loss(model(x, index), y)
            loss.backward()
            applied = optimizer.step()
            total += loss.item()
            if applied:
                state.count += 1
        state.history = [*state.history[:epoch], state.count]
    return state.step


assert train(state) == state.count
