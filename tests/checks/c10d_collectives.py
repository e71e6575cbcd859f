"""Checks of the backend "farandole": collectives of tensors do what Gloo's do, and what Gloo cannot, rightly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

import farandole as fd
from tests.checks.c10d_reference import same_as_gloo, values

# Their names before torch 2.13, and today's: the old ones warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
SHAPES = [(), (5,), (3, 4), (40_000,)]


def from_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + 100.0 * rank


def check_all_reduce_as_gloo() -> None:
    for op in OPS:
        options = AllreduceOptions()
        options.reduceOp = op
        for dtype in [*FLOATS, *INTEGERS]:
            for shape in SHAPES:
                same_as_gloo(lambda group, tensors, o=options: group.allreduce(tensors, o), values(shape, dtype))


def check_reduce_as_gloo() -> None:
    for root in range(fd.size()):
        options = ReduceOptions()
        options.rootRank, options.rootTensor = root, 0
        ours = values((7,), torch.float32)
        mine = ours.clone()
        dist.reduce(ours, root)
        whole = mine.clone()
        dist.all_reduce(whole)
        assert torch.equal(ours, whole if fd.rank() == root else mine)


def check_reductions_that_gloo_does_not_have() -> None:
    size, rank = fd.size(), fd.rank()
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [(size - 1) / 2] * 3
    whole = torch.full((3,), -rank * 3)
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [int(-3 * sum(range(size)) / size)] * 3
    complex_sum = torch.full((2,), 1 + 2j)
    dist.all_reduce(complex_sum)
    assert complex_sum.tolist() == [size + 2j * size] * 2
    for op, expected in (
        (dist.ReduceOp.SUM, True),
        (dist.ReduceOp.BOR, True),
        (dist.ReduceOp.MAX, True),
        (dist.ReduceOp.PRODUCT, False),
        (dist.ReduceOp.BAND, False),
        (dist.ReduceOp.MIN, False),
    ):
        flags = torch.tensor([rank == 0])
        dist.all_reduce(flags, op)
        assert flags.tolist() == [expected], op
    for op, expected_bits in (
        (dist.ReduceOp.BAND, 0),
        (dist.ReduceOp.BOR, 2**size - 1),
        (dist.ReduceOp.BXOR, 2**size - 1),
    ):
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, op)
        assert bits.tolist() == [expected_bits]
    with pytest.raises(ValueError, match="cannot reduce complex tensors by MAX"):
        dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="bitwise operations need an integer or bool dtype"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR)


def check_a_sparse_sum() -> None:
    mine = torch.sparse_coo_tensor([[0, fd.rank() + 1]], [1.0, 2.0], (fd.size() + 1,), check_invariants=True)
    dist.all_reduce(mine)
    assert mine.to_dense().tolist() == [float(fd.size()), *[2.0] * fd.size()]


def check_several_all_reduces_in_one() -> None:
    some = [torch.full((3,), fd.rank() + 1.0), torch.full((2, 2), 2)]
    with dist.distributed_c10d._coalescing_manager():
        for each in some:
            dist.all_reduce(each)
    assert some[0].tolist() == [sum(range(fd.size() + 1))] * 3
    assert some[1].flatten().tolist() == [2 * fd.size()] * 4


def check_broadcast_as_gloo() -> None:
    for root in range(fd.size()):
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            for shape in SHAPES:
                same_as_gloo(lambda group, tensors, o=options: group.broadcast(tensors, o), values(shape, dtype))


def check_tensors_that_are_not_contiguous() -> None:
    base = torch.zeros(4, 6)
    columns = base.t()[::2]
    columns.fill_(fd.rank() + 1.0)
    dist.all_reduce(columns)
    total = float(sum(range(fd.size() + 1)))
    assert base.tolist() == [[total, 0.0] * 3] * 4
    dist.broadcast(columns.fill_(float(fd.rank())), 1)
    assert base.tolist() == [[1.0, 0.0] * 3] * 4
    slots = [torch.zeros(3, 2).t() for _ in range(fd.size())]
    dist.all_gather(slots, from_rank(fd.rank(), 2, 3))
    assert all(torch.equal(slot, from_rank(rank, 2, 3)) for rank, slot in enumerate(slots))


def check_all_gather_as_gloo() -> None:
    for dtype in [*FLOATS, *INTEGERS, torch.bool]:
        for shape in SHAPES:
            slots = [torch.zeros(shape, dtype=dtype) for _ in range(fd.size())]
            same_as_gloo(lambda group, some: group.allgather([some[1:]], [some[0]]), values(shape, dtype), *slots)


def check_all_gather_into_one_tensor() -> None:
    whole = torch.empty(fd.size() * 2, 3)
    work = all_gather_single(whole, from_rank(fd.rank(), 2, 3), async_op=True)
    assert work is not None
    assert work.wait()
    expected = torch.cat([from_rank(rank, 2, 3) for rank in range(fd.size())])
    assert torch.equal(whole, expected)
    stacked = torch.empty(fd.size(), 2, 3)
    all_gather_single(stacked, from_rank(fd.rank(), 2, 3))
    assert torch.equal(stacked.view(-1, 3), expected)
    outputs = [torch.empty(fd.size() * 4), torch.empty(fd.size())]
    with dist.distributed_c10d._coalescing_manager():
        for output, size in zip(outputs, (4, 1), strict=True):
            all_gather_single(output, torch.full((size,), float(fd.rank())))
    assert outputs[1].tolist() == [float(rank) for rank in range(fd.size())]


def check_gather_and_scatter_as_gloo() -> None:
    for root in range(fd.size()):
        is_root = fd.rank() == root
        gathering, scattering = GatherOptions(), ScatterOptions()
        gathering.rootRank = scattering.rootRank = root
        slots = [torch.zeros(3, 2) for _ in range(fd.size() if is_root else 0)]

        def gather(group: dist.ProcessGroup, some: list[torch.Tensor], options: GatherOptions = gathering) -> object:
            return group.gather([some[1:]] if len(some) > 1 else [], [some[0]], options)

        def scatter(group: dist.ProcessGroup, some: list[torch.Tensor], options: ScatterOptions = scattering) -> object:
            return group.scatter([some[0]], [some[1:]] if len(some) > 1 else [], options)

        same_as_gloo(gather, values((3, 2), torch.float32), *slots)
        parts = [values((3, 2), torch.float32, seed=part) for part in range(len(slots))]
        same_as_gloo(scatter, torch.zeros(3, 2), *parts)


def check_reduce_scatter() -> None:
    size, rank = fd.size(), fd.rank()
    total = float(sum(range(size)))
    output = torch.empty(2, 3)
    dist.reduce_scatter(output, [from_rank(rank, 2, 3) + part for part in range(size)])
    assert torch.equal(output, from_rank(0, 2, 3) * size + 100 * total + size * rank)
    single = torch.empty(2)
    reduce_scatter_single(single, torch.arange(2.0 * size) + rank, dist.ReduceOp.AVG)
    assert single.tolist() == [2.0 * rank + total / size, 2.0 * rank + 1 + total / size]
    uneven = [torch.ones(part + 1) for part in range(size)]
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, uneven)
    assert mine.tolist() == [float(size)] * (rank + 1)
    with dist.distributed_c10d._coalescing_manager():
        reduce_scatter_single(single, torch.ones(2 * size))
        reduce_scatter_single(output, torch.ones(2 * size, 3))
    assert single.tolist() == [float(size)] * 2
    with pytest.raises(ValueError, match="makes no"):
        dist.group.WORLD.reduce_scatter_single(torch.empty(2), torch.empty(2 * size + 1))


def check_all_to_all() -> None:
    size, rank = fd.size(), fd.rank()
    same_as_gloo(
        lambda group, some: group.alltoall_base(some[1], some[0], [], [], AllToAllOptions()),
        values((size * 2, 3), torch.int64),
        torch.zeros(size * 2, 3, dtype=torch.int64),
    )
    sent = [torch.full((to + 1,), 10.0 * rank + to) for to in range(size)]
    received = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(received, sent)
    assert [each.tolist() for each in received] == [[10.0 * source + rank] * (rank + 1) for source in range(size)]
    output = torch.empty(size * (rank + 1))
    dist.all_to_all_single(output, torch.cat(sent), [rank + 1] * size, [to + 1 for to in range(size)])
    assert torch.equal(output, torch.cat(received))
    large = [torch.full((30_000,), 10.0 * rank + to) for to in range(size)]
    taken = [torch.empty(30_000) for _ in range(size)]
    dist.all_to_all(taken, large)
    assert [each[-1].item() for each in taken] == [10.0 * source + rank for source in range(size)]


def check_gather_scatter_and_all_to_all_in_a_subgroup() -> None:
    """Of all ranks but the first; large enough for several pieces."""
    members = list(range(1, fd.size())) or [0]
    group, numel = dist.new_group(members), 700_001
    if fd.rank() not in members:
        return
    place, root = members.index(fd.rank()), members[-1]
    outputs = [torch.empty(numel) for _ in members]
    dist.gather(torch.full((numel,), float(place)), outputs if fd.rank() == root else None, root, group=group)
    if fd.rank() == root:
        assert [each.unique().tolist() for each in outputs] == [[float(other)] for other in range(len(members))]
    parts = [torch.full((numel,), float(other)) for other in range(len(members))] if fd.rank() == root else None
    dist.scatter(outputs[0], parts, root, group=group)
    assert outputs[0].unique().tolist() == [float(place)]
    sent = [torch.full((numel + other,), 10.0 * place + other) for other in range(len(members))]
    received = [torch.empty(numel + place) for _ in members]
    dist.all_to_all(received, sent, group=group)
    assert [each.unique().tolist() for each in received] == [[10.0 * other + place] for other in range(len(members))]


def check_empty_tensors() -> None:
    dist.all_reduce(torch.empty(0))
    dist.broadcast(torch.empty(0, 3), 0)
    dist.all_gather([torch.empty(0) for _ in range(fd.size())], torch.empty(0))
    all_gather_single(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    reduce_scatter_single(torch.empty(0), torch.empty(0))


def check_objects() -> None:
    size, rank = fd.size(), fd.rank()
    everybody = [None] * size
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank * 50_000})
    assert [each["rank"] for each in everybody] == list(range(size))
    some = [f"from {rank}", rank]
    dist.broadcast_object_list(some, src=1)
    assert some == ["from 1", 1]
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(("of", rank), gathered, dst=1)
    assert gathered == ([("of", each) for each in range(size)] if rank == 1 else None)
    got: list[object] = [None]
    dist.scatter_object_list(got, [f"for {each}" for each in range(size)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]


def check_a_work_that_has_ended_says_so() -> None:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.result()[0] is tensor
    assert work.get_future().wait()[0].tolist() == [float(fd.size())] * 2
    barrier = dist.barrier(async_op=True)
    assert barrier is not None
    barrier.wait()
