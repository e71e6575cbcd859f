"""Checks of join(): ranks with less data than others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import farandole as fd
from tests.checks.tensors import assert_same, mine, of_all, of_rank, reduced


def with_zeros(ranks: range, op: int, seed: int) -> torch.Tensor:
    """What comes of it when only these ranks still have data."""
    parts = [part if rank in ranks else torch.zeros_like(part) for rank, part in enumerate(of_all(seed=seed))]
    return reduced(parts, op)


def check_ranks_with_less_data_contribute_zeros() -> None:
    """Rank r has r batches: rank 0 joins at once, the last rank last."""
    for op in (fd.Sum, fd.Average, fd.Min, fd.Max, fd.Product):
        for step in range(fd.rank()):
            active = range(step + 1, fd.size())
            assert_same(fd.allreduce(mine(seed=step), name=f"step.{step}", op=op), with_zeros(active, op, step))
        last = fd.join()
        assert isinstance(last, int)
        assert last == fd.size() - 1


def check_an_average_is_divided_by_all_ranks() -> None:
    if fd.rank() == 0:
        assert_same(fd.allreduce(torch.ones(3), name="alone"), torch.full((3,), 1 / fd.size()))
        assert fd.allreduce(torch.tensor([-2 * fd.size()]), name="alone").tolist() == [-2]
    assert fd.join() == 0 or fd.rank() != 0


def check_join_takes_a_device_by_position() -> None:
    assert 0 <= fd.join(-1) < fd.size()
    assert 0 <= fd.join(device=-1) < fd.size()


def check_many_joins_in_a_row() -> None:
    for epoch in range(10):
        busy = epoch % fd.size()
        if fd.rank() == busy:
            for step in range(3):
                assert_same(fd.allreduce(mine(seed=step), op=fd.Sum), of_rank(busy, seed=step))
        assert 0 <= fd.join() < fd.size()
        assert_same(fd.allreduce(mine(), op=fd.Sum), reduced(of_all(), fd.Sum))  # unnamed: all count alike again


def check_groups_in_place_and_scales_with_ranks_that_have_joined() -> None:
    if fd.rank() == fd.size() - 1:
        tensors = [mine(), mine(seed=1).long(), torch.tensor(2.0)]
        fd.grouped_allreduce_(tensors, name="group", op=fd.Sum, prescale_factor=2.0)
        assert_same(tensors[0], mine() * 2)
        assert_same(tensors[1], mine(seed=1).long() * 2)
        assert_same(tensors[2], torch.tensor(4.0))
        assert fd.allreduce(torch.tensor([True, False]), name="bools", op=fd.Sum).tolist() == [True, False]
        assert fd.allreduce(torch.empty(0), name="nothing").shape == (0,)
    assert 0 <= fd.join() < fd.size()


def check_a_barrier_passes_without_the_ranks_that_have_joined() -> None:
    if fd.rank() != 0:
        fd.barrier()
        fd.barrier()
    assert 0 <= fd.join() < fd.size()


def check_what_was_submitted_before_the_join_counts() -> None:
    handle = fd.allreduce_async(mine(), name="before", op=fd.Sum) if fd.rank() == 0 else None
    if fd.rank() != 0:
        assert_same(fd.allreduce(mine(), name="before", op=fd.Sum), reduced(of_all(), fd.Sum))
    assert 0 <= fd.join() < fd.size()
    if handle is not None:
        assert_same(fd.synchronize(handle), reduced(of_all(), fd.Sum))


def check_adasum_takes_a_joined_rank_for_zeros() -> None:
    if fd.size() & (fd.size() - 1) == 0 and fd.rank() == 0:
        assert_same(fd.allreduce(torch.ones(4), name="one", op=fd.Adasum), torch.ones(4))
    assert 0 <= fd.join() < fd.size()


def check_other_operations_fail_on_the_ranks_that_are_left() -> None:
    rows = (fd.size(), 2)
    others: list[Callable[[], object]] = [
        partial(fd.allgather, mine(), "left"),
        partial(fd.broadcast, mine(), 1, "left"),
        partial(fd.broadcast_, mine(), 0, "left"),  # the root has joined
        partial(fd.alltoall, mine(rows), None, "left"),
        partial(fd.reducescatter, mine(rows), "left"),
        partial(fd.grouped_allgather, [mine(), mine()], "left"),
        partial(fd.grouped_reducescatter, [mine(rows)], "left"),
        partial(fd.allgather_object, "anything", "left"),
        partial(fd.broadcast_object, "anything", 1, "left"),
    ]
    for other in others:
        if fd.rank() != 0:
            with pytest.raises(fd.HorovodInternalError, match=r"rank 0 has called join\(\)"):
                other()
            still = [fd.allreduce(mine(seed=k), name="still", op=fd.Sum) for k in range(2)]
            assert_same(still[1], with_zeros(range(1, fd.size()), fd.Sum, 1))
        assert 0 <= fd.join() < fd.size()
    assert_same(fd.allgather(mine(), "left"), torch.cat(of_all()))
