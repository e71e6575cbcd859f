"""Checks of allgather, broadcast, alltoall and reducescatter."""

from __future__ import annotations

import torch

import farandole as fd
from tests.checks.tensors import (
    FLOATS,
    INTEGERS,
    SIZED,
    SMALL_INTEGERS,
    assert_same,
    mine,
    of_all,
    of_rank,
    reduced,
    sized,
)

MOVABLE = (*INTEGERS, *SMALL_INTEGERS, *FLOATS, torch.bool, torch.complex64)
LARGE = 30_000
"""Rows that do not travel in one message any more."""


# Allgather ------------------------------------------------------------------------------------------------


def check_allgather_of_every_dtype() -> None:
    for dtype in MOVABLE:
        for shape in sized():
            assert_same(fd.allgather(mine(shape, dtype)), torch.cat(of_all(shape, dtype)))


def check_allgather_of_uneven_rows() -> None:
    size = fd.size()
    for rows in (lambda rank: rank, lambda rank: size - rank, lambda rank: 5 * (rank == 1), lambda rank: 0):
        wanted = torch.cat([of_rank(rank, (rows(rank), 3)) for rank in range(size)])
        assert_same(fd.allgather(mine((rows(fd.rank()), 3))), wanted)
    wanted = torch.cat([of_rank(rank, (LARGE * rank, 2)) for rank in range(size)])
    assert_same(fd.allgather(mine((LARGE * fd.rank(), 2))), wanted)


def check_allgather_of_changing_rows_under_one_name() -> None:
    for again in range(6):
        rows = [(rank + again) % 3 for rank in range(fd.size())]
        wanted = torch.cat([of_rank(rank, (count, 2), seed=again) for rank, count in enumerate(rows)])
        assert_same(fd.allgather(mine((rows[fd.rank()], 2), seed=again), "rows"), wanted)


def check_allgather_of_scalars_and_views() -> None:
    assert_same(fd.allgather(torch.tensor(fd.rank())), torch.arange(fd.size()))
    assert_same(fd.allgather(mine((4, 6)).t()), torch.cat([part.t() for part in of_all((4, 6))]))
    assert_same(fd.allgather(mine((4, 6))[:, 1]), torch.cat([part[:, 1] for part in of_all((4, 6))]))
    conjugate = (mine((3,)) + 1j * mine((3,))).conj()
    assert_same(fd.allgather(conjugate), torch.cat([(part + 1j * part).conj() for part in of_all((3,))]))


def check_allgather_in_order_of_arguments() -> None:
    wanted = torch.cat(of_all())
    assert_same(fd.allgather(mine(), "by position", fd.global_process_set), wanted)
    assert_same(fd.synchronize(fd.allgather_async(mine(), "by position", fd.global_process_set)), wanted)


# Broadcast ------------------------------------------------------------------------------------------------


def check_broadcast_of_every_dtype_from_every_root() -> None:
    for root in range(fd.size()):
        for dtype in MOVABLE:
            for shape in (*sized(), ()):
                tensor = mine(shape, dtype)
                result = fd.broadcast(tensor, root)
                assert_same(result, of_rank(root, shape, dtype))
                assert_same(tensor, mine(shape, dtype))
                assert shape in ((0,),) or result.data_ptr() != tensor.data_ptr()


def check_broadcast_in_place() -> None:
    last = fd.size() - 1
    for shape in (*SIZED, (), (LARGE, 3)):
        tensor = mine(shape)
        address = tensor.data_ptr()
        assert fd.broadcast_(tensor, last) is tensor
        assert_same(tensor, of_rank(last, shape))
        assert fd.synchronize(fd.broadcast_async_(tensor, 0, "in place")) is tensor
        assert_same(tensor, of_rank(last, shape))  # the same everywhere by now
        assert tensor.data_ptr() == address
    whole = mine((4, 6))
    fd.broadcast_(whole[:, ::2], 1)
    assert_same(whole[:, ::2], of_rank(1, (4, 6))[:, ::2])
    assert_same(whole[:, 1::2], mine((4, 6))[:, 1::2])


def check_a_parameter_can_be_overwritten() -> None:
    parameter = torch.nn.Parameter(mine((3, 2)))
    fd.broadcast_(parameter, 1)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert_same(parameter.detach(), of_rank(1, (3, 2)))


def check_broadcast_in_order_of_arguments() -> None:
    everybody = fd.global_process_set
    assert_same(fd.broadcast(mine(), 1, "one", everybody), of_rank(1))
    assert_same(fd.broadcast_(mine(), 1, "two", everybody), of_rank(1))
    assert_same(fd.synchronize(fd.broadcast_async(mine(), 1, "three", everybody)), of_rank(1))
    assert_same(fd.synchronize(fd.broadcast_async_(mine(), 1, "four", everybody)), of_rank(1))


# Alltoall -------------------------------------------------------------------------------------------------


def check_alltoall_of_even_rows_of_every_dtype() -> None:
    size, rank = fd.size(), fd.rank()
    for dtype in MOVABLE:
        for row in ((), (3,), (2, 2)):
            shape = (2 * size, *row)
            wanted = torch.cat([part[2 * rank : 2 * rank + 2] for part in of_all(shape, dtype)])
            result = fd.alltoall(mine(shape, dtype))
            assert isinstance(result, torch.Tensor)
            assert_same(result, wanted)
    assert_same(fd.alltoall(torch.empty(0, 3)), torch.empty(0, 3))


def rows_for(source: int, target: int) -> int:
    """An uneven deal, with nothing at all for some."""
    return (source + 2 * target) % 3


def check_alltoall_by_splits() -> None:
    size, rank = fd.size(), fd.rank()
    splits = [[rows_for(source, target) for target in range(size)] for source in range(size)]
    parts = [of_rank(source, (sum(splits[source]), 2)) for source in range(size)]
    wanted = torch.cat([part.split(split)[rank] for part, split in zip(parts, splits, strict=True)])
    received = torch.tensor([split[rank] for split in splits], dtype=torch.int32)
    for said in (splits[rank], tuple(splits[rank]), torch.tensor(splits[rank]), torch.tensor(splits[rank]).int()):
        ours, ours_received = fd.alltoall(parts[rank], said)
        assert_same(ours, wanted)
        assert_same(ours_received, received)


def check_alltoall_leaves_rows_out() -> None:
    size = fd.size()
    ours, received = fd.alltoall(mine((2 * size + 3, 2)), splits=[1] * size)
    assert_same(ours, torch.stack([part[fd.rank()] for part in of_all((2 * size + 3, 2))]))
    assert received.tolist() == [1] * size


def check_alltoall_from_one_to_all_and_back() -> None:
    size, rank = fd.size(), fd.rank()
    tensor = torch.arange(size * (size + 1) // 2 * 2).view(-1, 2) if rank == 0 else torch.empty(0, 2, dtype=torch.int64)
    splits = list(range(1, size + 1)) if rank == 0 else [0] * size
    here, received = fd.alltoall(tensor, splits)
    assert here.shape == (rank + 1, 2)
    assert received.tolist() == [rank + 1] + [0] * (size - 1)
    back, _ = fd.alltoall(here, [rank + 1] + [0] * (size - 1))
    assert_same(back, tensor)


def check_alltoall_of_megabytes() -> None:
    size, rank = fd.size(), fd.rank()
    splits = [LARGE * (target + 1) for target in range(size)]
    parts = of_all((sum(splits), 1))
    ours, received = fd.alltoall(parts[rank], splits)
    assert_same(ours, torch.cat([part.split(splits)[rank] for part in parts]))
    assert received.tolist() == [splits[rank]] * size


def check_alltoall_in_order_of_arguments_and_results() -> None:
    size, everybody = fd.size(), fd.global_process_set
    wanted = torch.stack([part[fd.rank()] for part in of_all((size, 2))])
    ours, received = fd.alltoall(mine((size, 2)), torch.ones(size, dtype=torch.int32), "one", everybody)
    assert_same(ours, wanted)
    for splits in (None, [1] * size):  # the asynchronous form always gives both
        ours, received = fd.synchronize(fd.alltoall_async(mine((size, 2)), splits, "two", everybody))
        assert_same(ours, wanted)
        assert_same(received, torch.ones(size, dtype=torch.int32))


# Reducescatter --------------------------------------------------------------------------------------------


def share(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows: the first ranks get one more."""
    return torch.tensor_split(whole, fd.size())[fd.rank()]


def check_reducescatter_of_every_dtype() -> None:
    for dtype in (*INTEGERS, *FLOATS):
        for op in (fd.Sum, fd.Average):
            for shape in ((2 * fd.size(),), (fd.size(), 3), (4 * fd.size(), 2, 2)):
                tensor = mine(shape, dtype)
                assert_same(fd.reducescatter(tensor, op=op), share(reduced(of_all(shape, dtype), op)))
                assert_same(tensor, mine(shape, dtype))


def check_reducescatter_of_uneven_rows() -> None:
    for rows in range(2 * fd.size() + 2):  # with fewer rows than ranks, and none
        assert_same(fd.reducescatter(mine((rows, 3)), op=fd.Sum), share(reduced(of_all((rows, 3)), fd.Sum)))
    shape = (LARGE + 1, 2)
    assert_same(fd.reducescatter(mine(shape)), share(reduced(of_all(shape), fd.Average)))


def check_reducescatter_averages_unless_told_otherwise() -> None:
    shape = (fd.size(), 2)
    assert_same(fd.reducescatter(mine(shape)), share(reduced(of_all(shape), fd.Average)))
    assert_same(fd.synchronize(fd.reducescatter_async(mine(shape))), share(reduced(of_all(shape), fd.Average)))
    bools = fd.reducescatter(mine((fd.size(),), torch.bool), op=fd.Sum)
    assert_same(bools, share(torch.stack(of_all((fd.size(),), torch.bool)).any(0)))


def check_reducescatter_in_order_of_arguments() -> None:
    shape, everybody = (fd.size() + 1, 2), fd.global_process_set
    wanted = share(reduced([part * 2 for part in of_all(shape)], fd.Sum) * 3)
    ours = fd.reducescatter(mine(shape), "one", fd.Compression.none, fd.Sum, everybody, 2.0, 3.0)
    assert_same(ours, wanted)
    handle = fd.reducescatter_async(mine(shape), "two", fd.Sum, everybody, 2.0, 3.0)
    assert_same(fd.synchronize(handle), wanted)


def check_reducescatter_of_views() -> None:
    wanted = share(reduced([part.t() for part in of_all((4, 6))], fd.Sum))
    assert_same(fd.reducescatter(mine((4, 6)).t(), op=fd.Sum), wanted)
