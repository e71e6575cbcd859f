"""An elastic job over streams of unequal length; a worker kills itself in the middle of the second epoch."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch

import farandole as fd
from farandole.testing.records import Records

SAMPLES, STREAMS = 500, 7


class Numbers:
    """Numbers 0, 1, ...: stream v has every STREAMS-th from v on, so that streams 0 to 2 are longer by one."""

    def stream(self, stream: int, streams: int) -> Iterator[int]:
        return iter(range(stream, SAMPLES, streams))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed", type=Path, required=True, help="made by the worker that kills itself")
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fd.elastic.StreamLoader(Numbers(), 12, streams=STREAMS, transform=lambda n: torch.tensor([n / SAMPLES]))
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for epoch in loader.epochs(3):
            for x in loader:
                records.before_step(state)
                if epoch == 1 and loader.cursor >= 200 and fd.rank() == 1 and not options.killed.exists():
                    options.killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if optimizer.step():
                    records.after_step(state)

    train(state)
    records.at_end(state)


if __name__ == "__main__":
    main()
