"""One of two workers is killed and replaced; each prints a line of JSON before and after it is a member."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import farandole as fd
from farandole.errors import GroupOutdated
from farandole.testing.quick_start import without_compiler

without_compiler()
torch.set_num_threads(1)
fd.init(default_group=True)
model = torch.nn.Linear(2, 1)
parallel = torch.nn.parallel.DistributedDataParallel(model)
state = fd.elastic.TorchState(model=model, has_lost=False)


def say(**words: object) -> None:
    reduced = torch.ones(1)
    dist.all_reduce(reduced)
    sys.stdout.write(json.dumps({"size": dist.get_world_size(), "reduced": reduced.item(), **words}) + "\n")
    sys.stdout.flush()


def outdated(group: dist.ProcessGroup) -> str:
    try:
        dist.barrier(group)
    except GroupOutdated as error:
        return str(error)
    return ""


say(event="init")
is_newcomer = fd.size() == 1
alone = dist.new_group([0]) if is_newcomer else None


@fd.elastic.run
def train(state: fd.elastic.TorchState) -> None:
    while not state.has_lost or fd.size() < 2:
        if fd.size() == 2:
            state.has_lost = True
            state.commit()
            dist.barrier()
            if fd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        threading.Event().wait(0.02)  # the newcomer needs the processor
        state.commit()


train(state)
say(event="end", outdated=outdated(alone) if alone is not None else "")
