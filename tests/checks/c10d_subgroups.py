"""Checks of the backend "farandole": subgroups whose members share memory do what subgroups do by messages."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import farandole as fd
from farandole.integrations.torchrun.process_group import FarandoleGroup, c10d_collectives
from farandole.training.collectives import world
from farandole.training.collectives.p2p_transport import P2PTransport
from farandole.training.collectives.subgroup_transport import SubgroupTransport
from farandole.training.collectives.transport import Transport

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
SIZES = [0, 1, 7, 5_000, 40_000]
LARGE = 600_000  # several pieces of the staging area
REDUCIBLE = {torch.float32: ReduceOp.AVG, torch.int64: ReduceOp.MAX, torch.uint8: ReduceOp.BXOR}


def group_without_rank_0() -> tuple[list[int], dist.ProcessGroup] | None:
    """A new group of the other ranks; None on rank 0, and where the other ones are not several."""
    members = list(range(1, fd.size()))
    group = dist.new_group(members)
    return (members, group) if fd.rank() and len(members) > 1 and group is not None else None


def transport_of(group: dist.ProcessGroup) -> Transport:
    assert isinstance(group, FarandoleGroup)
    return group.members.transport("check")


def messages_among(ranks: list[int], subject: bytes) -> P2PTransport:
    p2p = world.current().p2p
    assert p2p is not None
    return P2PTransport(p2p, ranks, subject.ljust(16))


def results(transport: Transport, numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The results of all collectives; the values differ from one rank to the next, and sums are exact."""
    size, rank, root = transport.size, transport.rank, transport.size - 1

    def mine(seed: int = 0) -> torch.Tensor:
        return ((torch.arange(numel) + 3 * rank + seed) % 5).to(dtype)

    def empty(count: int = 1) -> torch.Tensor:
        return torch.zeros(count * numel, dtype=dtype)

    reduced, at_root, part, copied, whole, single = mine(), mine(), empty(), mine(), empty(size), empty(size)
    op = REDUCIBLE.get(dtype, ReduceOp.SUM)
    c10d_collectives.all_reduce(transport, [reduced], op)
    c10d_collectives.reduce(transport, [at_root], op, root)
    c10d_collectives.reduce_scatter(transport, part, [mine(each) for each in range(size)], op)
    c10d_collectives.broadcast(transport, [copied], root)
    c10d_collectives.all_gather_single(transport, whole, mine())
    c10d_collectives.all_to_all_single(transport, single, torch.cat([mine(each) for each in range(size)]), [], [])
    slots = [empty() for _ in range(size)]
    c10d_collectives.all_gather(transport, slots, mine())
    gathered = [empty() for _ in range(size if rank == root else 0)]
    c10d_collectives.gather(transport, gathered, mine(), root)
    scattered, given = empty(), [mine(each) for each in range(size)] if rank == root else []
    c10d_collectives.scatter(transport, scattered, given, root)
    yield from (reduced, at_root, part, copied, whole, single, *slots, *gathered, scattered)


def check_all_collectives_in_memory_are_those_of_messages() -> None:
    made = group_without_rank_0()
    if made is None:
        return
    members, group = made
    assert isinstance(transport_of(group), SubgroupTransport)
    messages = messages_among(members, b"reference")
    for dtype in DTYPES:
        for numel in [*SIZES, LARGE] if dtype in (torch.float32, torch.uint8) else SIZES:
            for one, other in zip(
                results(transport_of(group), numel, dtype), results(messages, numel, dtype), strict=True
            ):
                assert torch.equal(one, other), (dtype, numel)
    dist.destroy_process_group(group)


def check_groups_with_common_members_are_used_in_turn() -> None:
    """Each rank is in two of them, with the next rank and with the previous one."""
    size, rank = fd.size(), fd.rank()
    pairs = [[each, (each + 1) % size] for each in range(size if size > 2 else 0)]
    groups = [(pair, dist.new_group(pair)) for pair in pairs]
    for number in range(20):
        for pair, group in groups:
            if rank in pair:
                tensor = torch.full((1 + number * 5_000,), rank + 1.0)
                dist.all_reduce(tensor, group=group)
                assert tensor.unique().tolist() == [sum(pair) + 2.0]
        dist.barrier()
    for pair, group in groups:
        if rank in pair:
            dist.destroy_process_group(group)


@contextmanager
def without_memory() -> Iterator[None]:
    """This process can make no files of more than 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_all_members_send_messages_where_one_has_no_memory() -> None:
    made = group_without_rank_0()
    if made is None:
        return
    members, group = made
    if fd.rank() == members[-1]:
        with without_memory():
            transport = transport_of(group)
    else:
        transport = transport_of(group)
    assert isinstance(transport, P2PTransport)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    assert tensor.unique().tolist() == [float(len(members))]
    dist.destroy_process_group(group)


def check_a_group_of_another_thread_has_its_own_memory() -> None:
    """A group of all ranks, as checkpoints that are written in the background use it."""
    group, found = dist.new_group(), list[object]()

    def work() -> None:
        for _ in range(20):
            tensor = torch.ones(30_000)
            dist.all_reduce(tensor, group=group)
            found.append(tensor.unique().tolist())

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(30_000))
    thread.join(30)
    assert found == [[float(fd.size())]] * 20
    assert isinstance(transport_of(group), SubgroupTransport)
    dist.destroy_process_group(group)


def check_a_destroyed_group_leaves_nothing_behind() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:farandole")

    def use_one() -> None:
        made = group_without_rank_0()
        if made is not None:
            dist.all_reduce(torch.ones(100_000), group=made[1])
            dist.destroy_process_group(made[1])
        dist.barrier()

    use_one()
    before = held()
    for _ in range(20):
        use_one()
    assert held() == before
