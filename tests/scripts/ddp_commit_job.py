"""DistributedDataParallel under the commit rule, without a loader of ours: all workers train the same samples, so that
the result does not depend on how many there are."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)).double()


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.flip(1)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--slow-below", type=int, default=0, help="take more and more time below this generation")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_compiler()
    fd.init(default_group=True)
    model = DistributedDataParallel(build(), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        while state.step < options.steps:
            time.sleep(0.02 * 1.1**state.step if fd.generation() < options.slow_below else 0)
            optimizer.zero_grad()
            loss(model, state.step).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            records.after_step(state)

    train(state)
    if fd.rank() == 0:
        torch.save(model.module.state_dict(), options.result)


if __name__ == "__main__":
    main()
