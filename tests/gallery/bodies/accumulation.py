"""Gradients that are summed over several passes."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
limit = {"micro_batch_size": 2} if kind.startswith("micro") else {"max_local_batch": 3} if kind == "local" else {}
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5, **limit)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, applied=0)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for number, (x, y, index) in enumerate(loader):
            if kind == "chunks":  # by hand, inside of one batch
                optimizer.zero_grad()
                for part in torch.arange(len(x)).split(2):
                    loss = F.mse_loss(model(x[part], index[part]), y[part], reduction="sum")
                    (loss / len(x)).backward()
                optimizer.step()
            elif kind == "micro-if":  # the classic form
                F.mse_loss(model(x, index), y).backward()
                if (number + 1) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                optimizer.zero_grad()
                F.mse_loss(model(x, index), y).backward()
                if kind == "micro-clip" and loader.batch.is_last:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                if optimizer.step():
                    state.applied += 1


train(state)
