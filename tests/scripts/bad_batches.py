"""A script of torchrun with losses that are not finite; all ranks leave such batches out. Each rank prints the samples
that it has trained, and whether its weights are finite."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BAD = 24, (0, 13)  # without shuffling, the first one is in the first batch

dist.init_process_group("gloo")
torch.manual_seed(0)
numbers = torch.arange(float(SAMPLES))
values = torch.where(torch.isin(numbers, torch.tensor(BAD, dtype=numbers.dtype)), float("nan"), numbers / SAMPLES)
dataset = TensorDataset(numbers, values.reshape(SAMPLES, 1))
loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, shuffle=False))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trained: list[int] = []
for _ in range(2):
    for number, value in loader:
        optimizer.zero_grad()
        loss = model(value).mean()
        bad = torch.tensor(float(not torch.isfinite(loss)))
        dist.all_reduce(bad)
        if bad:
            continue
        loss.backward()
        optimizer.step()
        trained += number.int().tolist()
is_finite = all(bool(torch.isfinite(each).all()) for each in model.parameters())
print("trained", *trained, "finite", is_finite, flush=True)
dist.destroy_process_group()
