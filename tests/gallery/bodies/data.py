"""Data sets, orders, loaders, and models whose result depends on the batch."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, SAMPLES, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()


class Augmented(Samples):
    """Draws a random number for each sample, by torch's generator."""

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype), y, index


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        samples = Samples()
        return (samples[index] for index in range(SAMPLES))


class Growing(Samples):
    """A curriculum: what the script sets in it moves with the steps."""

    noise = 0.0

    def state_dict(self):
        return {"noise": self.noise}

    def load_state_dict(self, state):
        self.noise = state["noise"]


class Lists(Samples):
    """Items that are dictionaries."""

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return {"x": x, "rest": (y, index)}


def collate(items):
    x, y, index = zip(*((each["x"], *each["rest"]) for each in items), strict=True)
    return torch.stack(x), torch.stack(y), torch.tensor(index)


between = {
    "dropout": [torch.nn.Dropout(0.3)],
    "batchnorm": [torch.nn.BatchNorm1d(8)],
    "syncbn": [fd.SyncBatchNorm(8)],
    "layernorm": [torch.nn.LayerNorm(8)],
}
size = 100 if kind in ("short", "carry", "drop") else SAMPLES
model = Net(*between.get(kind, []), size=size)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
dataset = {"augmented": Augmented, "growing": Growing, "collate": Lists}.get(kind, Samples)(size)
more = {
    "sequential": {"shuffle": False},
    "weighted": {"order": fd.elastic.Weighted([1.0 + index % 3 for index in range(SAMPLES)], SAMPLES)},
    "stratified": {"order": fd.elastic.Stratified([index % 4 for index in range(SAMPLES)])},
    "bucketed": {"order": fd.elastic.Bucketed([index % 5 + 1 for index in range(SAMPLES)], 24)},
    "carry": {"tail": "carry"},
    "drop": {"drop_last": True},
    "workers": {"num_workers": 2},
    "collate": {"collate_fn": collate},
    "batchnorm": {"min_local_batch": 2},
}
if kind == "stream":
    loader = fd.elastic.StreamLoader(Stream(), BATCH, streams=4)
else:
    loader = fd.elastic.DataLoader(dataset, BATCH, seed=5, **more.get(kind, {}))
tracked = {"dataset": dataset} if kind == "growing" else {}
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, **tracked)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            if kind == "growing":
                dataset.noise += 0.25
            optimizer.zero_grad()
            F.mse_loss(model(x, index), y).backward()
            optimizer.step()


train(state)
