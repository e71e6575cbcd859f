"""Checks of the backend "farandole": messages from one rank to another, and groups of some ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import farandole as fd
from farandole.errors import CollectiveMismatch


def check_everybody_sends_before_anybody_receives() -> None:
    size, rank = fd.size(), fd.rank()
    large = torch.full((2_000_000,), float(rank))
    dist.send(large, (rank + 1) % size)
    dist.recv(large, (rank - 1) % size)
    assert large[0] == large[-1] == (rank - 1) % size


def check_messages_arrive_by_their_tags() -> None:
    size, rank = fd.size(), fd.rank()
    to, source = (rank + 1) % size, (rank - 1) % size
    for tag in (3, 1, 2, 1):
        dist.send(torch.tensor([rank, tag, tag]), to, tag=tag)
    for tag in (1, 2, 3, 1):
        arrived = torch.zeros(3, dtype=torch.int64)
        assert dist.recv(arrived, source, tag=tag) == source
        assert arrived.tolist() == [source, tag, tag]


def check_messages_of_one_tag_keep_their_order() -> None:
    size, rank = fd.size(), fd.rank()
    to, source = (rank + 1) % size, (rank - 1) % size
    slots = [torch.zeros(1) for _ in range(5)]
    receiving = [dist.irecv(slot, source) for slot in slots]
    for number in range(5):
        work = dist.isend(torch.tensor([float(number)]), to)
        assert work is not None
        work.wait()
    for work in reversed(receiving):
        assert work is not None
        work.wait()
        assert work.is_completed()
    assert [slot.item() for slot in slots] == [0.0, 1.0, 2.0, 3.0, 4.0]


def check_receiving_from_whoever_sends() -> None:
    if fd.rank() == 0:
        slot, sources = torch.zeros(2), []
        for _ in range(fd.size() - 1):
            source = dist.recv(slot)
            assert slot.tolist() == [float(source)] * 2
            sources.append(source)
        assert sorted(sources) == list(range(1, fd.size()))
    else:
        dist.send(torch.full((2,), float(fd.rank())), 0)


def check_a_batch_of_messages() -> None:
    size, rank = fd.size(), fd.rank()
    slot = torch.zeros(3, 2).t()
    batch = [
        dist.P2POp(dist.irecv, slot, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.full((2, 3), float(rank)), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert slot.tolist() == [[float((rank - 1) % size)] * 3] * 2


def check_objects_as_messages() -> None:
    size, rank = fd.size(), fd.rank()
    dist.send_object_list([{"from": rank}, "text"], (rank + 1) % size)
    objects = [None, None]
    dist.recv_object_list(objects, (rank - 1) % size)
    assert objects == [{"from": (rank - 1) % size}, "text"]


def check_a_message_of_another_size_is_an_error() -> None:
    size, rank = fd.size(), fd.rank()
    dist.send(torch.zeros(3), (rank + 1) % size)
    with pytest.raises(CollectiveMismatch, match="has sent 12 bytes, and the tensor of shape"):
        dist.recv(torch.zeros(4), (rank - 1) % size)


def check_groups_of_some_ranks() -> None:
    size, rank = fd.size(), fd.rank()
    pair, again, turned = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([1, 0])
    last = dist.new_group([size - 1])
    if rank < 2:
        for group in (pair, again, turned):
            assert dist.get_world_size(group) == 2
            assert dist.get_rank(group) == rank
            for numel in (3, 100_001):
                tensor = torch.full((numel,), rank + 1.0)
                dist.all_reduce(tensor, group=group)
                assert tensor.unique().tolist() == [3.0]
            slots = [torch.zeros(2), torch.zeros(2)]
            dist.all_gather(slots, torch.full((2,), float(rank)), group=group)
            assert [slot[0].item() for slot in slots] == [0.0, 1.0]
            number = torch.tensor([rank])
            dist.broadcast(number, 1, group=group)
            assert number.item() == 1
            dist.barrier(group)
        if rank == 0:
            dist.send(torch.tensor([7.0]), 1, group=again)
        else:
            slot = torch.zeros(1)
            dist.recv(slot, 0, group=again)
            assert slot.item() == 7.0
        dist.destroy_process_group(pair)
    if rank == size - 1:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=last)
        assert tensor.tolist() == [1.0, 1.0]


def check_a_group_that_only_its_members_make() -> None:
    rank = fd.rank()
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 1.0


def check_members_that_are_in_different_operations_are_told() -> None:
    if fd.size() == 2:
        return  # a group of everybody, whose transport would be of no use afterwards
    rank = fd.rank()
    group = dist.new_group([0, 1])
    if rank < 2:
        operation = partial(dist.all_reduce, torch.ones(3)) if rank == 0 else dist.barrier
        with pytest.raises(CollectiveMismatch, match=r"all ranks( of a group)? must make the same calls"):
            operation(group=group)
