"""Groups of the backend "farandole" in processes that no launcher has started: by a store, and by reconfigure().

Usage: groups_without_a_job.py store|variables|monitored|reconfigure. Three processes run the check; code 0: it holds.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import farandole

SIZE = 3
LIMIT = timedelta(seconds=60)


def meet_at_a_store(rank: int, folder: str) -> None:
    address = f"file://{folder}/store"
    dist.init_process_group("farandole", init_method=address, rank=rank, world_size=SIZE, timeout=LIMIT)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, SIZE, "farandole")
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == 3.0

    pair = dist.new_group([0, 2], timeout=timedelta(seconds=1))
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 6.0
    gloo = dist.new_group(backend="gloo")  # there is a store for it
    dist.all_reduce(tensor, group=gloo)

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad is not None
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]

    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            dist.barrier(group=pair)
    dist.barrier(group=gloo)
    dist.destroy_process_group()


def monitored(rank: int, folder: str) -> None:
    """A barrier that names the ranks that are missing, with Gloo's errors. The group is usable after it."""
    address = f"file://{folder}/store"
    dist.init_process_group("farandole", init_method=address, rank=rank, world_size=SIZE, timeout=LIMIT)
    group: Any = dist.group.WORLD
    pair: Any = dist.new_group([0, 2])
    group.monitored_barrier()
    group.monitored_barrier(LIMIT, wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"^\[Rank 0\]: Rank 2 failed to pass monitoredBarrier in 1500 ms$"):
            group.monitored_barrier(timedelta(seconds=1.5))
    elif rank == 1:
        told = "Rank 1 successfully reached monitoredBarrier, but received errors .* Rank 2 failed to pass"
        with pytest.raises(RuntimeError, match=told):
            group.monitored_barrier()
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"Ranks 1, 2 failed to pass monitoredBarrier in 50 ms"):
            group.monitored_barrier(timedelta(milliseconds=50), wait_all_ranks=True)
        with pytest.raises(RuntimeError, match=r"Rank 0 timed out in monitoredBarrier after 0 ms\. No ranks"):
            group.monitored_barrier(timedelta())
    dist.barrier()
    if rank == 0:  # rank 1 of the pair is rank 2
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass"):
            pair.monitored_barrier(timedelta(milliseconds=50))
    dist.barrier()
    assert total() == 6.0
    dist.destroy_process_group()


def meet_by_variables(rank: int, folder: str) -> None:
    """The pattern of scripts that start their processes by themselves."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(Path(folder) / "port").read_text())
    if rank == 0:
        os.environ.update(RANK="0", WORLD_SIZE=str(SIZE))  # the other way to say the same; no LOCAL_RANK
        dist.init_process_group("farandole", timeout=LIMIT)
    else:
        dist.init_process_group("farandole", rank=rank, world_size=SIZE, timeout=LIMIT)
    assert total() == 6.0
    dist.destroy_process_group()


def reconfigure(rank: int, folder: str) -> None:
    c10d: Any = dist  # torch's stubs of 2.13 lack these functions
    store = dist.FileStore(f"{folder}/store", SIZE)
    c10d.init_process_group(
        "farandole", store=store, rank=rank, world_size=SIZE, timeout=LIMIT, enable_reconfigure=True
    )
    assert c10d._supports_reconfigure()
    handles = exchange(store, "first", rank, c10d._get_reconfigure_handle())
    c10d._reconfigure(uuid=1, handles=handles).wait()
    assert total() == 6.0
    if rank != 1:
        c10d._reconfigure(uuid=2, handles=[handles[2], handles[0]]).wait()
        assert (dist.get_rank(), dist.get_world_size()) == ({0: 1, 2: 0}[rank], 2)
        assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1]
        assert total() == 3.0
        pair = dist.new_group([0, 1])
        assert total(pair) == 3.0
    exchange(store, "last", rank, "")
    dist.destroy_process_group()


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def exchange(store: dist.Store, name: str, rank: int, text: str) -> list[str]:
    store.set(f"{name}{rank}", text)
    return [store.get(f"{name}{each}").decode() for each in range(SIZE)]


CHECKS = {
    "store": meet_at_a_store,
    "variables": meet_by_variables,
    "monitored": monitored,
    "reconfigure": reconfigure,
}


def main() -> None:
    torch.set_num_threads(1)
    farandole.init()  # a world of one, which the forked processes inherit
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            (Path(folder) / "port").write_text(str(free.getsockname()[1]))
        torch.multiprocessing.start_processes(CHECKS[sys.argv[1]], (str(Path(folder)),), SIZE, start_method="fork")


if __name__ == "__main__":
    main()
