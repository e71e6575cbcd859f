"""Optimizers of several kinds, and what people build around them."""

import functools
import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
make = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "reset": lambda p: torch.optim.Adam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}
optimizer = fd.DistributedOptimizer(make.get(kind, lambda p: torch.optim.SGD(p, lr=0.1))(model.parameters()))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    loader=loader,
    slow=[parameter.detach().clone() for parameter in model.parameters()] if kind == "lookahead" else [],
)


def value_of(x, y, index):
    return F.mse_loss(model(x, index), y)


def sam(x, y, index, rho=0.05):
    optimizer.zero_grad()
    F.mse_loss(model(x, index), y).backward()
    with torch.no_grad():
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        moves = [parameter.grad * (rho / (norm + 1e-12)) for parameter in model.parameters()]
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    F.mse_loss(model(x, index), y).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    optimizer.step()


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            if kind == "sam":
                sam(x, y, index)
                continue
            if kind == "warm-up":
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * min(1.0, (state.step + 1) / 5)
            elif kind == "weight-noise":
                with torch.no_grad():
                    for parameter in model.parameters():
                        source = torch.Generator().manual_seed(state.step)
                        parameter.add_(
                            torch.randn(parameter.shape, generator=source, dtype=parameter.dtype), alpha=1e-3
                        )
            optimizer.zero_grad()
            F.mse_loss(model(x, index), y).backward()
            if kind == "reset" and state.step % 5 == 3:
                for each in optimizer.state.values():
                    each["exp_avg"].zero_()
            elif kind == "decay-between":
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.99)
            elif kind == "decay-data":
                for parameter in model.parameters():
                    parameter.data.mul_(0.99)
            elif kind == "lowered" and state.step == 6:
                optimizer.param_groups[0]["lr"] *= 0.5
            if kind == "lbfgs":
                optimizer.step(functools.partial(value_of, x, y, index))
                continue
            applied = optimizer.step()
            if kind == "lookahead" and applied and state.step % 3 == 0:
                with torch.no_grad():
                    for slow, fast in zip(state.slow, model.parameters(), strict=True):
                        slow.lerp_(fast, 0.5)
                        fast.copy_(slow)
            elif kind == "project" and applied:
                with torch.no_grad():
                    model.first.weight.div_(model.first.weight.norm(dim=1, keepdim=True).clamp(min=1.0))


train(state)
