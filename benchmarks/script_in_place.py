"""A script for torchrun as people write it: a small MLP on made-up numbers, with DistributedSampler and DDP, and
nothing of Farandole. For measurements it writes a line for each applied step into a file of its own."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (as people write it)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=128, help="of the hidden layer; 128: 0.025 M parameters")
    parser.add_argument("--records", type=Path, required=True, help="an existing folder")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    numbers = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))
    width = options.width
    layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = DDP(torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 20, sampler=sampler)
    records = (options.records / f"steps-{os.getpid()}.jsonl").open("a", buffering=1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def applied(*_: Any) -> None:
        """Write the line. torch calls it for a step that is applied."""
        line = {"pid": os.getpid(), "size": dist.get_world_size(), "attempt": attempt, "ns": time.monotonic_ns()}
        records.write(json.dumps(line) + "\n")

    optimizer.register_step_post_hook(applied)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
