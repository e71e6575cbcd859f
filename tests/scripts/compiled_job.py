"""A model that is compiled when it first runs, by a backend that tells when it does.

w1 kills itself at step 12 and is replaced. The others go on; when the new one has joined they train three epochs more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import farandole as fd

SAMPLES, GLOBAL_BATCH = 70, 12  # the last global batch of an epoch has 10


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    fd.init()
    compiled_in: list[int] = []  # generations; 0 before the admission

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled_in.append(fd.generation())
        return graph

    model = torch.nn.Linear(4, 1).double()
    compiled = torch.compile(model, backend=backend)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.randn(SAMPLES, 4, dtype=torch.float64)
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(data, data[:, :1]), GLOBAL_BATCH, seed=1)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    placed: set[tuple[int, int, int]] = set()

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        rest = 0
        for _ in loader.epochs(2000):
            for x, y in loader:
                placed.add((fd.generation(), fd.rank(), fd.size()))
                if state.step == 12 and fd.rank() == 1 and fd.generation() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(compiled(x), y).backward()
                optimizer.step()
                time.sleep(0.01)
            rest += fd.generation() >= 3
            if rest == 3:
                return

    train(state)
    (folder / f"{os.getpid()}.json").write_text(json.dumps([compiled_in, sorted(placed), state.step]))


if __name__ == "__main__":
    main()
