"""A script of DistributedDataParallel, for torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
features = torch.randn(2000, 20)
labels = (features[:, :10] ** 2).sum(1).gt(10).long()
dataset = torch.utils.data.TensorDataset(features, labels)
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(dataset, batch_size=25, sampler=torch.utils.data.DistributedSampler(dataset))


def train():
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


train()
dist.destroy_process_group()
