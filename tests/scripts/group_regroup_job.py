"""In each generation the last rank is killed while the others are in a collective of torch.distributed, or about to
call it, until one is left. Every worker prints a line of JSON for what it sees. In argv: an empty folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import farandole as fd
from farandole.errors import GroupOutdated, RecoverableError
from farandole.integrations.torchrun.process_group import FarandoleGroup, failure
from farandole.testing.quick_start import without_compiler

without_compiler()
torch.set_num_threads(1)
fd.init(default_group=True)
model = torch.nn.Linear(2, 1, bias=False)
parallel = torch.nn.parallel.DistributedDataParallel(model)
state = fd.elastic.TorchState(model=model, generations=0)
made: list[dist.ProcessGroup] = []
awaited: list[dist.Work] = []
folder = Path(sys.argv[1])


def say(**words: object) -> None:
    sys.stdout.write(json.dumps({"rank": fd.rank(), "size": fd.size(), **words}) + "\n")
    sys.stdout.flush()


def wait_for_others(size: int) -> None:
    """Its death may be known before they are through with what it has had its part in."""
    deadline = time.monotonic() + 30
    while not all((folder / f"{size}-{rank}").exists() for rank in range(size - 1)):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1_000_000))


def backward() -> None:
    parallel(torch.ones(1, 2)).sum().backward()


def receive() -> None:
    dist.recv(torch.ones(1), fd.size() - 1)


def in_subgroup() -> None:
    dist.all_reduce(torch.ones(3), group=made[-1])


OPERATIONS: dict[int, Callable[[], None]] = {5: in_subgroup, 4: all_reduce, 3: backward, 2: receive}


def outdated(group: dist.ProcessGroup) -> str:
    for use in (
        awaited[-1].wait,
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.barrier(group),
        lambda: group.send([torch.ones(1)], 0, 0),
        lambda: group.recv([torch.ones(1)], 0, 0),
    ):
        try:
            use()
        except GroupOutdated as error:
            text = str(error)
        else:
            return "nothing was raised"
    return text


@fd.elastic.run
def train(state: fd.elastic.TorchState) -> None:
    size = fd.size()
    parallel._update_process_group(dist.group.WORLD)
    say(
        event="entered",
        is_forgotten=failure() is None,
        c10d=[dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(dist.group.WORLD)],
        outdated=outdated(made[-1]) if made else None,
    )
    # Of all but rank 0 where there is a rank less, so that it is no other name for everybody.
    group = dist.new_group(list(range(1, size)) if size == 5 else list(range(size)))
    if isinstance(group, FarandoleGroup):  # this rank is a member
        made.append(group)
    if size > 1 and (work := dist.irecv(torch.ones(1), (fd.rank() + 1) % size, tag=9)) is not None:
        awaited.append(work)
    total = torch.tensor([float(fd.rank())])
    dist.all_reduce(total)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("all", "line"))
    members = torch.ones(1)
    dist.all_reduce(members, group=mesh["line"].get_group())
    model.zero_grad()
    backward()
    assert model.weight.grad is not None
    say(event="reduced", total=total.item(), members=members.item(), gradient=model.weight.grad.unique().tolist())
    state.commit()
    if size == 1:
        return
    if fd.rank() == size - 1:
        wait_for_others(size)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (folder / f"{size}-{fd.rank()}").touch()
        if size == 5 and fd.rank() == 0:
            all_reduce()
        else:
            OPERATIONS[size]()
    except RecoverableError as error:
        say(event="raised", what=type(error).__name__, is_known=failure() is error)
        raise
    except RuntimeError as error:
        known = failure()
        say(event="raised", what=type(error).__name__, is_known=isinstance(known, RecoverableError))
        raise known or error from None
    say(event="nothing was raised")


train(state)
say(event="end")
