"""Workers that do not hear that all have the gradients of a step, while others do and take it; then one of these dies.
Arguments: the slots of the first ones, that of the last one, how many others take the step, a folder; or "whole"."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import farandole as fd
from farandole.errors import GenerationEnded
from farandole.integrations.sharding import shard_path
from farandole.integrations.sharding.elastic_shards import ElasticShards
from farandole.integrations.sharding.shard_path import ShardPath

STEP, DEADLINE_S = 6, 30.0
IS_WHOLE = sys.argv[1] == "whole"  # without any of this, for comparison
BEHIND, DIES = (set(map(int, each.split(","))) for each in (("9", "9") if IS_WHOLE else sys.argv[1:3]))
give, stepped, complete = ShardPath._give_to_mirror, ElasticShards.stepped, ElasticShards._complete
world, slot = shard_path.world, int(os.environ["FARANDOLE_SLOT"])


class Deaf:
    """A transport whose all-reduce goes through, and is not heard."""

    def __init__(self) -> None:
        self._transport = world.current().transport
        self.size, self.rank = self._transport.size, self._transport.rank

    def all_reduce(self, *args: Any) -> None:
        self._transport.all_reduce(*args)
        raise GenerationEnded("all_reduce", 2, "not heard")


def give_unheard(path: ShardPath) -> None:
    is_deaf = slot in BEHIND and world.current().id.number == 1 and state.step == STEP
    shard_path.world = SimpleNamespace(current=lambda: SimpleNamespace(transport=Deaf())) if is_deaf else world
    try:
        give(path)
    finally:
        shard_path.world = world


def step_and_die(shards: ElasticShards, ready: Any) -> None:
    stepped(shards, ready)
    if world.current().id.number > 1 or state.step != STEP:
        return
    others, folder = int(sys.argv[3]), Path(sys.argv[4])
    if slot in DIES:
        deadline = time.monotonic() + DEADLINE_S
        while len(list(folder.iterdir())) < others:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / str(slot)).touch()


def say_that_it_completes(shards: ElasticShards, ready: Any) -> None:
    print("COMPLETES", slot, flush=True)
    complete(shards, ready)


ShardPath._give_to_mirror = give_unheard
ElasticShards.stepped = step_and_die
ElasticShards._complete = say_that_it_completes

fd.init(default_group=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5)).double()
if not IS_WHOLE:
    fully_shard(model[0])
    fully_shard(model)
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
if IS_WHOLE:
    optimizer = fd.DistributedOptimizer(optimizer)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
generator = torch.Generator().manual_seed(1)
inputs, targets = torch.randn(48, 6, generator=generator).double(), torch.arange(48) % 5
loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(inputs, targets), global_batch_size=4, seed=1)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, schedule=schedule)


@fd.elastic.run
def train(state: Any) -> None:
    for _ in loader.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()  # before others know that the step was taken


train(state)
whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
if fd.rank() == 0:
    print("WEIGHTS", *(f"{each.sum().item():.9f}" for each in whole), flush=True)
