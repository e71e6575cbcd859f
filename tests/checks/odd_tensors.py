"""Tensors whose memory is not what their shape suggests, in all operations: one element with a stride, expanded ones,
lazy negatives, without dimensions, without elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

import farandole as fd

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def odd(value: float) -> Iterator[torch.Tensor]:
    """Tensors that can be read and written; each has `value` in all elements."""
    for dtype in DTYPES:
        yield torch.full((1, 2), value).to(dtype)[:, 1]
        yield torch.full((3, 2, 2), value).to(dtype)[1:2, :1, 1]
        yield torch.full((2,), value).to(dtype).expand(2)[::2]
        yield torch.full((), value).to(dtype)
        yield torch.full((0, 3), value).to(dtype)[:, ::2]
        yield torch.full((2, 3, 4, 4), value).to(dtype).to(memory_format=torch.channels_last)
    yield torch.full((3,), complex(0, -value)).conj().imag  # a lazy negative


def check_broadcast_of_odd_tensors() -> None:
    for tensor, root_has in zip(odd(fd.rank()), odd(1), strict=True):
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, root_has)


def check_all_gather_of_odd_tensors() -> None:
    for number, mine in enumerate(odd(fd.rank())):
        gathered = [torch.empty_like(mine) for _ in range(fd.size())]
        dist.all_gather(gathered, mine)
        for rank, each in enumerate(gathered):
            assert torch.equal(each, list(odd(rank))[number])


def check_all_reduce_of_odd_tensors() -> None:
    total = sum(range(fd.size()))
    for tensor, whole in zip(odd(fd.rank()), odd(total), strict=True):
        if tensor.dtype is not torch.bool:
            dist.all_reduce(tensor)
            assert torch.equal(tensor, whole)


def check_an_odd_tensor_on_one_rank_only() -> None:
    column = torch.full((1, 2), float(fd.rank()))[:, 1]
    tensor = column if fd.rank() == 0 else column.clone()
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(fd.size()))


def check_odd_tensors_to_one_and_from_one() -> None:
    for dtype in DTYPES:
        mine = torch.full((1, 2), fd.rank()).to(dtype)[:, 1]
        room = torch.zeros(1, 2 * fd.size()).to(dtype)
        slots = [room[:, 2 * rank] for rank in range(fd.size())]
        dist.gather(mine, slots if fd.rank() == 0 else None)
        if fd.rank() == 0:
            assert all(torch.equal(each, torch.full((1,), rank).to(dtype)) for rank, each in enumerate(slots))
        given = [torch.full((1, 2), rank + 1).to(dtype)[:, 1] for rank in range(fd.size())]
        dist.scatter(mine, given if fd.rank() == 0 else None)
        assert torch.equal(mine, torch.full((1,), fd.rank() + 1).to(dtype))


def check_named_operations_with_odd_tensors() -> None:
    total, size = sum(range(fd.size())), fd.size()
    for number, tensor in enumerate(odd(fd.rank())):
        if tensor.is_complex():
            continue
        expected = list(odd(1))[number]
        assert torch.equal(fd.broadcast(tensor, 1, name="odd.broadcast"), expected)
        if tensor.dim():
            rows = fd.allgather(tensor, name="odd.allgather")
            assert torch.equal(rows, torch.cat([list(odd(rank))[number] for rank in range(size)]))
        if tensor.dtype not in (torch.bool, torch.int8):
            summed = fd.allreduce(tensor, op=fd.Sum, name="odd.allreduce")
            assert torch.equal(summed, list(odd(total))[number])
        fd.broadcast_(tensor, 1, name="odd.broadcast_")
        assert torch.equal(tensor, expected)
