"""The example of hybrid sharding in a job for tests: the last rank is killed before a part of a step (--kill); the
others hold at a batch until it is replaced. Rank 0 saves the parameters at the end.

A worker says a line of JSON when it enters the function."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from farandole.testing.quick_start import without_compiler

if "--checkpoint" not in sys.argv:  # DCP wants more of it
    without_compiler()
    # DTensors ask for its settings, which are a small file of their own.
    sys.modules["torch._dynamo"].__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.distributed.tensor import DTensor

import farandole as fd
from examples.hybrid_sharding.train import BATCH, build, loss_of
from farandole.sharding import ShardedState


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random: scikit-learn takes a second and a half to load, in each worker."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(480, 64, generator=generator).double(), torch.randint(0, 10, (480,), generator=generator)


SAVED_AT, KILLED_AT, HOLD_AT, STEPS = 5, 10, 25, 50

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--save", required=True)
parser.add_argument(
    "--kill", choices=["forward", "backward", "commit"], required=True, help="the last rank is, before it"
)
parser.add_argument("--checkpoint", help="a folder, written at one batch before the kill")
options = parser.parse_args()

torch.set_num_threads(1)
killed, held = Path(f"{options.save}.killed"), Path(f"{options.save}.held")
deadline_s = time.monotonic() + 60
while killed.exists() and not held.exists() and time.monotonic() < deadline_s:
    threading.Event().wait(0.02)  # a newcomer joins when the others wait for it, and not before
fd.init(default_group=True)
images, labels = data()
state = ShardedState(build, 2, options.checkpoint, batch=0)


def die_in(place: str) -> None:
    if place == options.kill and state.batch == KILLED_AT and fd.generation() == 1 and fd.rank() == fd.size() - 1:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@fd.elastic.run
def train(state: ShardedState) -> None:
    entered = {"batch": state.batch, "replicas": state.replicas, "shards": state.shards, "size": fd.size()}
    sys.stdout.write(json.dumps(entered | {"rank": fd.rank()}) + "\n")
    sys.stdout.flush()
    while state.batch < STEPS:
        while state.batch == HOLD_AT and 1 < fd.size() < 4:
            held.touch()
            threading.Event().wait(0.02)  # the newcomer needs a core to start
            state.check_host_updates()
        first = state.batch * BATCH % len(images)
        chosen = slice(first, first + BATCH)
        state.optimizer.zero_grad()
        die_in("forward")
        loss = loss_of(state.model, images[chosen], labels[chosen])
        die_in("backward")
        loss.backward()
        state.optimizer.step()
        die_in("commit")
        state.batch += 1
        if options.checkpoint and state.batch == SAVED_AT:
            state.save_checkpoint()
        state.commit()


train(state)
whole = {name: each.full_tensor() for name, each in state.model.state_dict().items() if isinstance(each, DTensor)}
if fd.rank() == 0:
    torch.save(whole, options.save)
