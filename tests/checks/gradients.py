"""Checks of the gradients that flow through operations: Horovod's rules, and what follows from them by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import farandole as fd
from tests.checks.tensors import assert_same, mine, of_all, of_rank, reduced


def weights(rank: int, shape: Sequence[int]) -> torch.Tensor:
    """What rank `rank` multiplies its result by: the gradient that enters there."""
    return of_rank(rank, shape, torch.float64, seed=3) + rank


def gradient(
    operation: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Size]:
    """Of this rank's tensor, and the result's shape."""
    tensor = mine(shape, torch.float64).requires_grad_()
    result = operation(tensor)
    assert result.requires_grad
    (result * weights(fd.rank(), result.shape)).sum().backward()
    assert tensor.grad is not None
    return tensor.grad, result.shape


def all_weights(shape: Sequence[int]) -> list[torch.Tensor]:
    return [weights(rank, shape) for rank in range(fd.size())]


def check_of_an_allreduce_is_reduced_as_the_tensor_was() -> None:
    for op in (fd.Sum, fd.Average):
        for name in (None, "through"):
            ours, shape = gradient(lambda t, name=name, op=op: fd.allreduce(t, name=name, op=op), (2, 3))
            assert_same(ours, reduced(all_weights(shape), op), rtol=1e-12)
    ours, shape = gradient(lambda t: fd.allreduce(t, op=fd.Sum, prescale_factor=0.5, postscale_factor=3.0), (4,))
    assert_same(ours, reduced(all_weights(shape), fd.Sum) * 1.5, rtol=1e-12)


def check_through_compression() -> None:
    ours, shape = gradient(lambda t: fd.allreduce(t, compression=fd.Compression.fp16, op=fd.Sum), (4,))
    assert_same(ours, reduced(all_weights(shape), fd.Sum))


def check_of_a_grouped_allreduce() -> None:
    tensors = [mine(shape, torch.float64).requires_grad_() for shape in ((2,), (3, 1), ())]
    results = fd.grouped_allreduce(tensors, op=fd.Average)
    sum((result * weights(fd.rank(), result.shape)).sum() for result in results[:2]).backward()  # type: ignore[union-attr]
    for tensor in tensors[:2]:
        assert_same(tensor.grad, reduced(all_weights(tensor.shape), fd.Average), rtol=1e-12)  # type: ignore[arg-type]
    assert_same(tensors[2].grad, torch.tensor(0.0).double())  # type: ignore[arg-type]  # not used by anybody


def check_of_an_allgather_is_the_average_for_ones_own_rows() -> None:
    size, rank = fd.size(), fd.rank()
    rows = [1 + 2 * place for place in range(size)]
    ours, shape = gradient(lambda t: fd.allgather(t), (rows[rank], 2))
    assert shape == (sum(rows), 2)
    assert_same(ours, reduced(all_weights(shape), fd.Average).split(rows)[rank], rtol=1e-12)
    nobody = [0 if place == 0 else 2 for place in range(size)]  # without rows on one rank
    ours, shape = gradient(lambda t: fd.allgather(t), (nobody[rank], 2))
    assert_same(ours, reduced(all_weights(shape), fd.Average).split(nobody)[rank], rtol=1e-12)
    scalar, _ = gradient(lambda t: fd.allgather(t), ())
    assert_same(scalar, reduced(all_weights((size,)), fd.Average)[rank], rtol=1e-12)


def check_of_a_grouped_allgather() -> None:
    size, rank = fd.size(), fd.rank()
    rows = [[1 + place for place in range(size)], [2] * size]
    tensors = [mine((each[rank], 2), torch.float64).requires_grad_() for each in rows]
    results = fd.grouped_allgather(tensors)
    sum((result * weights(rank, result.shape)).sum() for result in results).backward()  # type: ignore[union-attr]
    for tensor, each in zip(tensors, rows, strict=True):
        wanted = reduced(all_weights((sum(each), 2)), fd.Average).split(each)[rank]
        assert_same(tensor.grad, wanted, rtol=1e-12)  # type: ignore[arg-type]


def check_of_a_broadcast_goes_to_the_root() -> None:
    for root in range(fd.size()):
        ours, shape = gradient(lambda t, root=root: fd.broadcast(t, root), (2, 3))
        wanted = reduced(all_weights(shape), fd.Average) if fd.rank() == root else torch.zeros(2, 3).double()
        assert_same(ours, wanted, rtol=1e-12)


def check_of_an_alltoall_goes_back_where_the_rows_came_from() -> None:
    size, rank = fd.size(), fd.rank()
    ours, shape = gradient(lambda t: fd.alltoall(t), (2 * size, 3))  # type: ignore[arg-type,return-value]
    wanted = torch.cat([each[2 * rank : 2 * rank + 2] for each in all_weights(shape)])
    assert_same(ours, wanted)


def check_of_an_alltoall_with_splits_that_leave_rows_out() -> None:
    size, rank = fd.size(), fd.rank()
    splits = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    left_out = 2
    ours, _ = gradient(lambda t: fd.alltoall(t, splits[rank])[0], (sum(splits[rank]) + left_out, 2))
    back = []
    for target in range(size):
        received = [split[target] for split in splits]
        back.append(weights(target, (sum(received), 2)).split(received)[rank])
    assert_same(ours, torch.cat([*back, torch.zeros(left_out, 2).double()]))


def check_of_a_reducescatter_is_gathered() -> None:
    size = fd.size()
    for rows in (size, 2 * size + 1, 1):
        shapes = [tuple(part.shape) for part in torch.tensor_split(torch.empty(rows, 2), size)]
        gathered = torch.cat([weights(rank, shape) for rank, shape in enumerate(shapes)])
        for op, factor in ((fd.Sum, size), (fd.Average, 1)):
            ours, _ = gradient(lambda t, op=op: fd.reducescatter(t, op=op), (rows, 2))
            assert_same(ours, gathered * factor, rtol=1e-12)
            tensor = mine((rows, 2), torch.float64).requires_grad_()
            (result,) = fd.grouped_reducescatter([tensor], op=op, prescale_factor=2.0)
            (result * weights(fd.rank(), result.shape)).sum().backward()
            assert_same(tensor.grad, gathered * factor * 2, rtol=1e-12)  # type: ignore[arg-type]


def check_through_several_operations_at_once() -> None:
    tensor = mine((fd.size(), 2), torch.float64).requires_grad_()
    (fd.allreduce(tensor, name="a", op=fd.Sum) * fd.broadcast(tensor, 0, "b")).sum().backward()
    total, root = reduced(of_all((fd.size(), 2), torch.float64), fd.Sum), of_rank(0, (fd.size(), 2), torch.float64)
    wanted = root * fd.size() + (total if fd.rank() == 0 else 0)
    assert_same(tensor.grad, wanted, rtol=1e-12)  # type: ignore[arg-type]


def check_only_where_they_are_asked_for() -> None:
    with torch.no_grad():
        assert not fd.allreduce(mine().requires_grad_()).requires_grad
    assert not fd.allreduce(mine()).requires_grad
    assert not fd.synchronize(fd.allreduce_async(mine().requires_grad_(), name="detached")).requires_grad
    gathered = fd.allgather(mine().requires_grad_() if fd.rank() == 0 else mine())
    assert gathered.requires_grad == (fd.rank() == 0)


def check_in_process_sets() -> None:
    ranks = [0, fd.size() - 1]
    members = fd.add_process_set(ranks) if fd.size() > 2 else fd.global_process_set
    if fd.rank() in ranks:
        both = [weights(rank, (2,)) for rank in ranks]
        ours, _ = gradient(lambda t: fd.allreduce(t, op=fd.Average, process_set=members), (2,))
        assert_same(ours, reduced(both, fd.Average))
        ours, _ = gradient(lambda t: fd.broadcast(t, ranks[1], process_set=members), (2,))
        assert_same(ours, reduced(both, fd.Average) if fd.rank() == ranks[1] else torch.zeros(2).double())
        ours, shape = gradient(lambda t: fd.allgather(t, process_set=members), (1,))
        assert_same(ours, reduced([weights(rank, shape) for rank in ranks], fd.Average)[ranks.index(fd.rank()) :][:1])
        ours, _ = gradient(lambda t: fd.reducescatter(t, op=fd.Sum, process_set=members), (2,))
        assert_same(ours, torch.cat([weights(rank, (1,)) for rank in ranks]) * 2)
    if fd.size() > 2:
        assert fd.remove_process_set(members)
