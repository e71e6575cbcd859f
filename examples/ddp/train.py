"""Train a small network on scikit-learn's handwritten digits with DistributedDataParallel: a usual script of torchrun,
without a word of Farandole.

torchrun --standalone --nproc-per-node 2 train.py             torch's launcher
farandole torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py
                                                             a lost worker: all start again, from the snapshot
farandole run -np 2 --in-place python train.py                elastic: a lost worker costs one step
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAINED = 1440  # of the 1,797 images; the others are for the test


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(data.target)
        train_set = TensorDataset(images[:TRAINED], labels[:TRAINED])
        self.images, self.labels = images[TRAINED:], labels[TRAINED:]
        self.sampler = DistributedSampler(train_set, seed=0)
        self.loader = DataLoader(train_set, batch_size=options.batch_size, sampler=self.sampler)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 4 * 4, 10),
        )
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        self.snapshot, self.first_epoch = options.snapshot, 0
        if self.snapshot.exists():
            saved = torch.load(self.snapshot)
            network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.first_epoch = saved["epochs"]
        self.model = DistributedDataParallel(network)

    def train_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Each worker tests a part of the images."""
        rank, size = dist.get_rank(), dist.get_world_size()
        images, labels = self.images[rank::size], self.labels[rank::size]
        right = (self.model.module(images).argmax(dim=1) == labels).sum()
        counts = torch.stack([right, torch.tensor(len(labels))])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def save(self, epochs: int) -> None:
        states = {"network": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        temporary = self.snapshot.with_suffix(".new")
        torch.save({**states, "epochs": epochs}, temporary)
        temporary.rename(self.snapshot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=12, help="images of a step on each worker")
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"), help="a file for the state, each epoch")
    options = parser.parse_args()

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    trainer = Trainer(options)
    for epoch in range(trainer.first_epoch, options.epochs):
        trainer.train_epoch(epoch)
        accuracy = trainer.accuracy()
        if dist.get_rank() == 0:
            trainer.save(epoch + 1)
            print(f"epoch {epoch + 1:3d}   accuracy {accuracy:.2%}   workers {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
