"""A worker whose loop body forks children, which end in every way that Python has. They may not act as the worker."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable

import torch

import farandole as fd

TOO_LONG_S = 30.0


def raise_an_error() -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends
    raise ValueError("of the child")


def leave_the_world() -> None:
    fd.shutdown()
    sys.exit(0)


def be_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


WAYS: dict[str, tuple[Callable[[], object], int]] = {
    "exit": (lambda: sys.exit(0), 0),
    "shutdown": (leave_the_world, 0),
    "exception": (raise_an_error, 1),
    "SIGTERM": (be_terminated, -signal.SIGTERM),
}
"""What a child does, and its exit code."""


def fork(way: Callable[[], object]) -> int:
    """Return the exit code of a child."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(TOO_LONG_S, exit=True)
        way()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


fd.init()
model = torch.nn.Linear(4, 1)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), 8, seed=0)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@fd.elastic.run
def train(state: fd.elastic.TorchState) -> None:
    for _ in loader.epochs(1):
        for (x,) in loader:
            if state.step == 3 and fd.rank() == 0:
                for name, (way, code) in WAYS.items():
                    found = fork(way)
                    assert found == code, f"{name}: {found}"
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()


train(state)
print("trained", state.step, flush=True)
