"""A job whose data set raises: for one sample, the first time that it is fetched or whenever it is."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd

SAMPLES = 60


class Pictures(torch.utils.data.Dataset):
    def __init__(self, marks: Path, once: bool) -> None:
        self.marks, self.once = marks, once

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17 and not (self.once and self.marks.exists()):
            self.marks.touch()
            raise OSError(f"picture {index} cannot be decoded")
        return torch.tensor([float(index)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    data = Pictures(options.marks, options.once)
    loader = fd.elastic.DataLoader(data, global_batch_size=6, num_workers=options.num_workers)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(2):
            for x in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), x).backward()
                optimizer.step()

    train(state)


if __name__ == "__main__":
    main()
