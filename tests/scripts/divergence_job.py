"""A job in which one worker's state is changed by hand, at some steps; what the workers say of it is what tests read.

CHANGES: step:rank:kind, where kind is weight, momentum, buffer, ema or local (a buffer that each worker computes).
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.step_records import Records


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.register_buffer("table", torch.ones(40))
        self.register_buffer("last", torch.zeros(8))
        self.keeps_last = False

    def forward(self, x: torch.Tensor) -> Any:
        if self.keeps_last:
            self.last.copy_(x.mean(dim=0))
        return self.body(x * self.table[:8])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", nargs="*", default=[])
    parser.add_argument("--epochs", type=int, default=2, help="of 20 steps")
    parser.add_argument("--on-divergence", default="mend")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--local-buffer", action="store_true")
    parser.add_argument("--kill-at", type=int, default=-1, help="rank 2 kills itself in this step of generation 1")
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init(default_group=options.ddp)
    numbers = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))
    net = Net()
    net.keeps_last = options.local_buffer
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False) if options.ddp else net
    if not options.ddp:
        optimizer = fd.DistributedOptimizer(optimizer)
    loader = fd.elastic.DataLoader(dataset, global_batch_size=12, seed=0)
    state: Any = fd.elastic.TorchState(
        model=model,
        optimizer=optimizer,
        loader=loader,
        ema=copy.deepcopy(net),
        on_divergence=options.on_divergence,
    )
    changes = [each.split(":") for each in options.changes]
    records = Records(options.records)

    def change(kind: str) -> None:
        weight = net.body[2].weight
        target = {
            "weight": weight,
            "momentum": optimizer.state.get(weight, {}).get("exp_avg"),
            "buffer": net.table,
            "ema": state.ema.body[0].weight,
        }[kind]
        target.view(-1)[3] += 0.5

    @fd.elastic.run
    def train(state: Any) -> None:
        for _ in loader.epochs(options.epochs):
            for x, y in loader:
                records.before_step(state)
                optimizer.zero_grad()
                if state.step == options.kill_at and fd.rank() == 2 and fd.generation() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                F.mse_loss(model(x), y).backward()
                if not optimizer.step():
                    continue
                records.after_step(state)
                with torch.no_grad():
                    for mine, other in zip(state.ema.parameters(), net.parameters(), strict=True):
                        mine.lerp_(other, 0.01)
                    for step, rank, kind in changes:
                        if state.step == int(step) and fd.rank() == int(rank):
                            change(kind)

    train(state)
    records.at_end(state)
    named = [*net.named_parameters(), *state.ema.named_parameters(prefix="ema"), ("table", net.table)]
    sums = {name: round(float(value.detach().double().sum()), 12) for name, value in named}
    print("END", state.step, sorted(sums.items()), flush=True)


if __name__ == "__main__":
    main()
