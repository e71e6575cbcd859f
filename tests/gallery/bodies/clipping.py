"""What people do to gradients between backward() and step(), or with them."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, largest=0.0, skipped=0)
norms = []


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x, index), y).backward()
            if kind == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            elif kind == "strict":
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, error_if_nonfinite=True)
                state.largest = max(state.largest, norm.item())
            elif kind == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            elif kind == "noise":
                source = torch.Generator().manual_seed(state.step)
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=source)
                    parameter.grad.add_(noise, alpha=0.01)
            elif kind == "log":
                norms.append([parameter.grad.norm().item() for parameter in model.parameters()])
            elif kind == "adaptive":
                for parameter in model.parameters():
                    limit = 0.1 * parameter.detach().norm().clamp(min=0.01)
                    parameter.grad.mul_((limit / parameter.grad.norm().clamp(min=1e-12)).clamp(max=1.0))
            elif kind == "skip":  # a spike: no step, but a gradient of zeros
                if sum(parameter.grad.square().sum() for parameter in model.parameters()) > 1.0:
                    optimizer.zero_grad(set_to_none=False)
                    state.skipped += 1
            elif kind == "data":
                for parameter in model.parameters():
                    parameter.grad.data.clamp_(-0.01, 0.01)
            elif kind == "centralize":
                for parameter in model.parameters():
                    if parameter.grad.dim() > 1:
                        parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)
            optimizer.step()


train(state)
