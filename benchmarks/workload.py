"""What the recovery benchmark trains: a small MLP on made-up numbers, fast enough to show every pause."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import time

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.step_records import Records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=128, help="of the hidden layers; 128: 0.025 M parameters")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel and torch's optimizer")
    parser.add_argument("--other-ms", type=float, default=0.0, help="of each step: what a script computes beside it")
    parser.add_argument(
        "--hold-s", type=float, default=0.0, help="of the last rank's every 20th step, in which it keeps the GIL"
    )
    parser.add_argument("--records")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init(default_group=options.ddp)
    numbers = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))
    widths = [64] + [options.width] * options.layers
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])
    model.append(torch.nn.Linear(options.width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if options.ddp:
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = fd.DistributedOptimizer(optimizer)
    loader = fd.elastic.DataLoader(dataset, global_batch_size=60, seed=0, num_workers=options.num_workers)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(options.epochs):
            for x, y in loader:
                records.before_step(state)
                if options.hold_s and state.step % 20 == 19 and fd.rank() == fd.size() - 1:
                    ctypes.PyDLL(None).usleep(int(1e6 * options.hold_s))  # no other thread of this process runs
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if optimizer.step():
                    records.after_step(state)
                other_until_s = time.thread_time() + options.other_ms / 1000
                while time.thread_time() < other_until_s:
                    pass

    train(state)
    records.at_end(state)


if __name__ == "__main__":
    main()
