"""A few collectives and an elastic function, under any launcher; prints one line that a test reads."""

from __future__ import annotations

import sys

import torch

import farandole as fd
from farandole.testing.quick_start import without_compiler

without_compiler()
fd.init()
mean = fd.mean(torch.tensor([1.0, 2.0]) * fd.rank(), weight=fd.rank())
flags = fd.any(fd.rank() == fd.size() - 1), fd.any(False)

torch.manual_seed(fd.rank())  # different models: rank 0's becomes everybody's
model = torch.nn.Linear(2, 1)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(20, 2, generator=torch.Generator().manual_seed(0)))
loader = fd.elastic.DataLoader(data, global_batch_size=6, seed=1)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@fd.elastic.run
def train(state: fd.elastic.TorchState) -> float:
    for _ in loader.epochs(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return float(model.weight.detach().sum())


weight = train(state)
sys.stdout.write(  # in one piece: several ranks write to one pipe
    f"RESULT rank={fd.rank()} size={fd.size()} local={fd.local_rank()}/{fd.local_size()} slot={fd.slot()} "
    f"mean={mean.tolist()} any={flags} steps={state.step} equal={fd.mean(weight) == weight} weight={weight!r}\n"
)
sys.stdout.flush()
fd.shutdown()
