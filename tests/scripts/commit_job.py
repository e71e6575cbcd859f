"""A job in Horovod's style for tests: commits every few batches, records what it committed and where it went on."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

import farandole as fd
from farandole.errors import HorovodInternalError
from farandole.testing.quick_start import without_compiler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", type=Path, required=True, help="train until this file exists")
    parser.add_argument("--batches-per-commit", type=int, default=3)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--raise-once", type=Path, help="rank 1 makes this file at batch 30, and raises")
    parser.add_argument("--own-sync", action="store_true", help="a state that broadcasts from rank 0 by itself")
    parser.add_argument("--commit-follows-step", action="store_true", help="promised to the state")
    parser.add_argument("--records")
    options = parser.parse_args()

    path = Path(options.records) / f"worker-{os.getpid()}.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(what: str, state: Any) -> None:
        """One write(2), so it survives a kill -9 right after it."""
        line = {
            "what": what,
            "batch": state.batch,
            "trail": len(state.trail[0]),
            "parameters": digest(state.model),
            "messages": state._host_messages.qsize(),
            "pid": os.getpid(),
            "rank": fd.rank(),
            "size": fd.size(),
            "generation": fd.generation(),
        }
        os.write(file, json.dumps(line).encode() + b"\n")

    torch.set_num_threads(1)
    without_compiler()
    torch.manual_seed(os.getpid())  # so that only a sync can make the workers equal
    fd.init()

    model = torch.nn.Sequential(torch.nn.Linear(8, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1))
    optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    kind = OwnSync if options.own_sync else fd.elastic.TorchState
    promise = options.commit_follows_step
    state = kind(model, optimizer, commit_follows_step=promise, batch=0, trail=[[]], first=digest(model))
    state.register_reset_callbacks([lambda: record("reset", state)])

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> int:
        record("enter", state)
        while not fd.any(options.stop.exists()):
            if options.raise_once and state.batch == 30 and fd.rank() == 1 and not options.raise_once.exists():
                options.raise_once.touch()
                raise HorovodInternalError("only once, only here")
            # The same on all ranks, so that the result does not depend on their number.
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(state.batch))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            state.batch += 1
            state.trail[0].append(state.batch)  # nested: a shallow copy would not be rolled back
            if state.batch % options.batches_per_commit == 0:
                try:
                    state.commit()
                finally:
                    record("commit", state)  # saving comes first, whatever is raised then
        return state.batch

    result = train(state)
    assert state.trail == [list(range(1, result + 1))], "not every batch was trained once"
    record("end", state)


class OwnSync(fd.elastic.TorchState):
    def sync(self) -> None:
        super().sync()


def digest(model: torch.nn.Module) -> str:
    whole = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(whole).hexdigest()


if __name__ == "__main__":
    main()
