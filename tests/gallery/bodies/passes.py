"""Several losses, several passes, and graphs that are used in unusual ways."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


def penalty(x, index):
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x, index).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            optimizer.zero_grad()
            if kind == "two-passes":
                (0.25 * F.mse_loss(model(x, index), y)).backward()
                (0.75 * F.l1_loss(model(x, index), y)).backward()
            elif kind == "retain":
                out = model(x, index)
                F.mse_loss(out, y).backward(retain_graph=True)
                F.l1_loss(out, y).backward()
            elif kind == "losses":
                out = model(x, index)
                losses = {"mse": F.mse_loss(out, y), "l1": F.l1_loss(out, y), "size": out.square().mean()}
                (sum(losses.values()) / 3).backward()  # the whole sum diverges in long runs, at this learning rate
            elif kind == "penalty":
                (F.mse_loss(model(x, index), y) + 0.1 * penalty(x, index)).backward()
            elif kind == "checkpoint-reentrant":
                hidden = checkpoint(model.first, x.requires_grad_(True), use_reentrant=True)
                hidden = checkpoint(model.between, hidden, use_reentrant=True)
                F.mse_loss(model.last(hidden), y).backward()
            elif kind == "checkpoint":
                out = checkpoint(model, x, index, use_reentrant=False)
                F.mse_loss(out, y).backward()
            elif kind == "checkpoint-sequential":
                parts = torch.nn.Sequential(model.first, model.between, model.last)
                F.mse_loss(checkpoint_sequential(parts, 2, x, use_reentrant=False), y).backward()
            elif kind == "grad":  # gradients by torch.autograd.grad, put into place by hand
                gradients = torch.autograd.grad(F.mse_loss(model(x, index), y), list(model.parameters()))
                surrogate = sum((g.detach() * p).sum() for g, p in zip(gradients, model.parameters(), strict=True))
                surrogate.backward()
            elif kind == "inputs":
                F.mse_loss(model(x, index), y).backward(inputs=list(model.parameters()))
            elif kind == "hooks":
                out = model(x, index)
                out.register_hook(lambda gradient: 0.5 * gradient.sign() * gradient.abs())
                F.mse_loss(out, y).backward()
            elif kind == "unused":  # only some of the parameters get a gradient
                F.mse_loss(
                    model(x, index) if state.step % 2 else model.last(torch.zeros(len(x), 8).double()), y
                ).backward()
            optimizer.step()


train(state)
