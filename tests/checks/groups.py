"""Checks of grouped operations, and of the sum of sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import farandole as fd
from tests.checks.tensors import FLOATS, INTEGERS, assert_same, mine, of_all, of_rank, reduced

SHAPES = (3,), (2, 2), (0,), (), (1, 5)


def assert_all_same(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(wanted)
    for each, other in zip(ours, wanted, strict=True):
        assert_same(each, other)


def check_grouped_allreduce_of_several_dtypes_and_shapes() -> None:
    for op in (fd.Sum, fd.Average, fd.Min, fd.Max, fd.Product):
        for dtypes in ((torch.float32,), (*INTEGERS, *FLOATS)):
            wanted = [reduced(of_all(shape, dtype), op) for shape in SHAPES for dtype in dtypes]
            tensors = [mine(shape, dtype) for shape in SHAPES for dtype in dtypes]
            assert_all_same(fd.grouped_allreduce(tensors, op=op), wanted)
            assert_all_same(fd.synchronize(fd.grouped_allreduce_async(tensors, op=op)), wanted)
            assert_all_same(tensors, [mine(shape, dtype) for shape in SHAPES for dtype in dtypes])


def check_grouped_allreduce_in_place() -> None:
    wanted = [reduced(of_all(shape), fd.Average) for shape in SHAPES]
    tensors = [mine(shape) for shape in SHAPES]
    results = fd.grouped_allreduce_(tensors)
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert_all_same(tensors, wanted)
    tensors = [mine(shape) for shape in SHAPES]
    results = fd.synchronize(fd.grouped_allreduce_async_(tensors))
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert_all_same(tensors, wanted)


def check_the_order_of_arguments() -> None:
    everybody = fd.global_process_set
    wanted = [reduced([part * 2 for part in of_all()], fd.Sum) * 3] * 2
    two = [mine(), mine()]
    assert_all_same(fd.grouped_allreduce(two, None, "g1", fd.Compression.none, fd.Sum, 2.0, 3.0, everybody), wanted)
    copies = [mine(), mine()]
    assert_all_same(fd.grouped_allreduce_(copies, None, "g2", fd.Sum, 2.0, 3.0, everybody), wanted)
    handle = fd.grouped_allreduce_async(two, None, "g3", fd.Sum, 2.0, 3.0, everybody)
    assert_all_same(fd.synchronize(handle), wanted)
    handle = fd.grouped_allreduce_async_([mine(), mine()], None, "g4", fd.Sum, 2.0, 3.0, everybody)
    assert_all_same(fd.synchronize(handle), wanted)
    gathered = [torch.cat(of_all())] * 2
    assert_all_same(fd.grouped_allgather(two, "g5", everybody), gathered)
    assert_all_same(fd.synchronize(fd.grouped_allgather_async(two, "g6", everybody)), gathered)
    shared = [torch.tensor_split(each, fd.size())[fd.rank()] for each in wanted]
    ours = fd.grouped_reducescatter(two, "g7", fd.Compression.none, fd.Sum, everybody, 2.0, 3.0)
    assert_all_same(ours, shared)
    handle = fd.grouped_reducescatter_async(two, "g8", fd.Sum, everybody, 2.0, 3.0)
    assert_all_same(fd.synchronize(handle), shared)


def check_grouped_allgather_of_uneven_rows() -> None:
    rank, size = fd.rank(), fd.size()
    dtypes = torch.float32, torch.uint8, torch.bool
    rows = [[place + k for k in range(3)] for place in range(size)]
    tensors = [mine((count, 2), dtype) for count, dtype in zip(rows[rank], dtypes, strict=True)]
    wanted = [
        torch.cat([of_rank(place, (rows[place][k], 2), dtype) for place in range(size)])
        for k, dtype in enumerate(dtypes)
    ]
    assert_all_same(fd.grouped_allgather(tensors), wanted)


def check_grouped_reducescatter() -> None:
    shapes = (fd.size(), 2), (2 * fd.size() + 1,), (1, 3), (0, 2)
    for op in (fd.Sum, fd.Average):
        wanted = [torch.tensor_split(reduced(of_all(shape), op), fd.size())[fd.rank()] for shape in shapes]
        assert_all_same(fd.grouped_reducescatter([mine(shape) for shape in shapes], op=op), wanted)


def check_a_group_of_nothing_is_nothing() -> None:
    assert list(fd.grouped_allreduce([])) == []
    assert list(fd.grouped_allreduce_([])) == []
    assert list(fd.grouped_allgather([])) == []
    assert list(fd.grouped_reducescatter([])) == []
    assert list(fd.synchronize(fd.grouped_allreduce_async([], name="nothing"))) == []


def check_a_group_of_one_and_a_tuple() -> None:
    assert_all_same(fd.grouped_allreduce((mine(),), op=fd.Sum), [reduced(of_all(), fd.Sum)])


def check_a_large_group_among_single_operations() -> None:
    handles = [fd.allreduce_async(mine(seed=k), name=f"single.{k}", op=fd.Sum) for k in range(5)]
    group = fd.grouped_allreduce_async([mine(seed=k) for k in range(200)], name="two hundred", op=fd.Sum)
    handles += [fd.allreduce_async(mine(seed=k), name=f"single.{k}", op=fd.Sum) for k in range(5, 10)]
    assert_all_same(fd.synchronize(group), [reduced(of_all(seed=k), fd.Sum) for k in range(200)])
    for k, handle in enumerate(handles):
        assert_same(fd.synchronize(handle), reduced(of_all(seed=k), fd.Sum))


def check_groups_in_another_order_on_each_rank() -> None:
    names = [f"group.{k}" for k in range(6)]
    turned = names[fd.rank() :] + names[: fd.rank()]
    handles = {
        name: fd.grouped_allreduce_async([mine(seed=int(name[-1])), mine((2,))], name=name, op=fd.Sum)
        for name in turned
    }
    for k, name in enumerate(names):
        assert_all_same(fd.synchronize(handles[name]), [reduced(of_all(seed=k), fd.Sum), reduced(of_all((2,)), fd.Sum)])


# Sparse ---------------------------------------------------------------------------------------------------


def sparse_of(rank: int, entries: int) -> torch.Tensor:
    """A 6 by 2 tensor with rows (rank + k) for k < entries."""
    indices = torch.tensor([[(rank + k) % 6 for k in range(entries)]], dtype=torch.int64).reshape(1, entries)
    values = torch.arange(2.0 * entries).view(entries, 2) + rank
    return torch.sparse_coo_tensor(indices, values, (6, 2), check_invariants=True)


def check_sparse_tensors_are_summed_or_averaged() -> None:
    for entries in (lambda rank: 3, lambda rank: rank, lambda rank: 0):
        total = sum(sparse_of(rank, entries(rank)).to_dense() for rank in range(fd.size()))
        assert isinstance(total, torch.Tensor)
        for op, wanted in ((fd.Sum, total), (fd.Average, total / fd.size())):
            for name in (None, "sparse"):
                wait = fd.sparse_allreduce_async(sparse_of(fd.rank(), entries(fd.rank())), name, op)
                ours = wait()
                assert ours.is_sparse
                assert_same(ours.to_dense(), wanted, rtol=1e-6)


def check_sparse_tensors_in_flight_together() -> None:
    waits = [
        fd.sparse_allreduce_async(sparse_of(fd.rank(), k + 1), f"sparse.{k}", fd.Sum, fd.global_process_set)
        for k in range(4)
    ]
    for k, wait in reversed(list(enumerate(waits))):
        total = sum(sparse_of(rank, k + 1).to_dense() for rank in range(fd.size()))
        assert isinstance(total, torch.Tensor)
        assert_same(wait().to_dense(), total)
