"""An elastic job over streams of unequal length, with states of their own."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch

import farandole as fd
from farandole.testing.step_records import Records

SAMPLES, STREAMS = 500, 7


class Numbers:
    """Numbers 0, 1, ...: stream v has every STREAMS-th from v on, so that streams 0 to 2 are longer by one."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged

    def stream(self, stream: int, streams: int) -> Stream:
        return Stream(stream, self.damaged)


class Stream(Iterator[int]):
    def __init__(self, next_sample: int, damaged: int) -> None:
        self.next_sample, self.damaged = next_sample, damaged

    def __next__(self) -> int:
        sample = self.next_sample
        if sample >= SAMPLES:
            raise StopIteration
        if sample == self.damaged:
            raise ArithmeticError(f"sample {sample} is damaged")
        self.next_sample += STREAMS
        return sample

    def state_dict(self) -> dict[str, int]:
        return {"next_sample": self.next_sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_sample = state["next_sample"]


def as_input(number: int) -> torch.Tensor:
    return torch.tensor([number / SAMPLES])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed", type=Path, help="made by rank 1, which kills itself in the second epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop", type=Path, help="end after the epoch in which this file is there")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--damaged", type=int, default=-1, help="this sample cannot be read")
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fd.elastic.StreamLoader(
        Numbers(options.damaged),
        12,
        streams=STREAMS,
        stateful=True,
        transform=as_input,
        num_workers=options.num_workers,
        micro_batch_size=options.micro_batch_size,
    )
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for epoch in loader.epochs(options.epochs):
            for x in loader:
                records.before_step(state)
                is_due = options.killed and epoch == 1 and loader.cursor >= 200 and fd.rank() == 1
                if is_due and not options.killed.exists():
                    options.killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if optimizer.step():
                    records.after_step(state)
            if options.stop and fd.any(options.stop.exists()):
                break

    train(state)
    records.at_end(state)


if __name__ == "__main__":
    main()
