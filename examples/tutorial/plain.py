"""A plain PyTorch loop, for one process."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
features = torch.randn(2000, 20)
labels = (features[:, :10] ** 2).sum(1).gt(10).long()
dataset = torch.utils.data.TensorDataset(features, labels)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True)


def train():
    for epoch in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


train()
