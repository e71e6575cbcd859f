"""The last rank is killed in an all-reduce of a subgroup, of all ranks but the first; the others say how they learn of
it, and what is left of the group in the next generation. Every worker prints a line of JSON. In argv: an empty
folder."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import farandole as fd
from farandole.errors import GroupOutdated, RecoverableError
from farandole.integrations.torchrun.process_group import FarandoleGroup
from farandole.testing.quick_start import without_compiler

without_compiler()
torch.set_num_threads(1)
fd.init(default_group=True)
model = torch.nn.Linear(2, 1, bias=False)
state = fd.elastic.TorchState(model=model)
killed = Path(sys.argv[1]) / "killed"
made: list[FarandoleGroup] = []


def say(**words: object) -> None:
    sys.stdout.write(json.dumps({"size": fd.size(), "rank": fd.rank(), **words}) + "\n")
    sys.stdout.flush()


def held() -> tuple[int, int]:
    """Descriptors of shared memory, and mappings of it."""
    gc.collect()
    open_ones = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            open_ones += "memfd:farandole" in os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # that of the folder itself
            continue
    return open_ones, Path("/proc/self/maps").read_text().count("memfd:farandole")


def kill_soon() -> None:
    """Kill this worker while its main thread is in one of many all-reduces."""
    time.sleep(0.3)
    killed.write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def reduce_until_lost(group: dist.ProcessGroup) -> None:
    if fd.rank() == fd.size() - 1:
        threading.Thread(target=kill_soon).start()
    tensor = torch.ones(2 << 20)
    try:
        while True:
            dist.all_reduce(tensor.fill_(1.0), group=group)
            assert tensor[-1].item() == fd.size() - 1
    except RecoverableError as error:
        say(event="raised", what=type(error).__name__, after_s=time.monotonic() - float(killed.read_text()))
        raise


@fd.elastic.run
def train(state: fd.elastic.TorchState) -> None:
    if made:
        try:
            dist.all_reduce(torch.ones(1), group=made[-1])
        except GroupOutdated as error:
            say(event="outdated", text=str(error))
    before = held()
    group = dist.new_group(list(range(1, fd.size())))
    say(event="entered", held=before)
    dist.barrier()
    if isinstance(group, FarandoleGroup):  # this rank is a member
        made.append(group)
        tensor = torch.ones(2 << 20)
        dist.all_reduce(tensor, group=group)
        say(event="reduced", total=tensor.unique().tolist(), is_in_memory=held()[1] > before[1])
    if fd.size() == 4:
        if isinstance(group, FarandoleGroup):
            reduce_until_lost(group)
        dist.barrier()  # rank 0 waits here for the others


train(state)
say(event="end")
