"""The script of ddp.py, elastic."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import farandole as fd

torch.manual_seed(0)
fd.init(default_group=True)
features = torch.randn(2000, 20)
labels = (features[:, :10] ** 2).sum(1).gt(10).long()
dataset = torch.utils.data.TensorDataset(features, labels)
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = fd.elastic.DataLoader(dataset, global_batch_size=50)


@fd.elastic.run
def train(state):
    for epoch in loader.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


train(fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader))
dist.destroy_process_group()
