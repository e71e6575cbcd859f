"""Checks of allreduce and its kin: dtypes, operations, scales, in place, compression, Adasum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farandole as fd
from tests.checks.tensors import FLOATS, HALVES, INTEGERS, assert_same, mine, of_all, reduced, sized


def check_every_dtype_by_every_operation() -> None:
    for dtype in (*INTEGERS, *FLOATS):
        for op in (fd.Sum, fd.Average, fd.Min, fd.Max, fd.Product):
            for shape in sized():
                tensor = mine(shape, dtype)
                kept = tensor.clone()
                assert_same(fd.allreduce(tensor, op=op), reduced(of_all(shape, dtype), op))
                assert_same(tensor, kept)


def check_bools_are_combined_as_bools() -> None:
    said = torch.stack(of_all((5,), torch.bool))
    for op, wanted in (
        (fd.Sum, said.any(0)),
        (fd.Max, said.any(0)),
        (fd.Product, said.all(0)),
        (fd.Min, said.all(0)),
    ):
        assert_same(fd.allreduce(mine((5,), torch.bool), op=op), wanted)


def check_the_average_is_what_nobody_asks_for() -> None:
    assert_same(fd.allreduce(mine()), reduced(of_all(), fd.Average))
    assert_same(fd.synchronize(fd.allreduce_async(mine())), reduced(of_all(), fd.Average))


def check_averages_of_integers_are_truncated_toward_zero() -> None:
    size = fd.size()
    for dtype in INTEGERS:
        totals = [-size - 1, -size, -1, 0, 1, size - 1, size, 2 * size + 1]
        tensor = torch.zeros(len(totals), dtype=dtype)
        if fd.rank() == size - 1:
            tensor = torch.tensor(totals, dtype=dtype)
        wanted = [int(total / size) for total in totals]
        assert wanted[2] == 0, "rounded down it would be -1"
        assert fd.allreduce(tensor).tolist() == wanted


def check_large_integers_keep_all_their_digits() -> None:
    large = 2**53 + 1  # the first that float64 has not
    assert fd.allreduce(torch.tensor([large]), op=fd.Max).tolist() == [large]
    assert fd.allreduce(torch.tensor([large if fd.rank() == 0 else 0]), op=fd.Sum).tolist() == [large]
    assert fd.allreduce(torch.tensor([large])).tolist() == [large]


def check_scales_before_and_after() -> None:
    for dtype in FLOATS:
        for op in (fd.Sum, fd.Average, fd.Max):
            ours = fd.allreduce(mine((6,), dtype), op=op, prescale_factor=0.5, postscale_factor=3.0)
            wanted = reduced([part.double() * 0.5 for part in of_all((6,), dtype)], op) * 3.0
            assert_same(ours.double(), wanted, rtol=0.02 if dtype in HALVES else 1e-5)


def check_scales_of_integers_are_truncated() -> None:
    for dtype in INTEGERS:
        tensor = torch.tensor([-3, -1, 1, 3], dtype=dtype)
        halves = fd.allreduce(tensor, op=fd.Sum, prescale_factor=0.5)
        assert_same(halves, torch.tensor([-1, 0, 0, 1], dtype=dtype) * fd.size())
        sums = [-3 * fd.size(), -fd.size(), fd.size(), 3 * fd.size()]
        ours = fd.allreduce(tensor, op=fd.Sum, postscale_factor=0.5)
        assert ours.tolist() == [int(total * 0.5) for total in sums]


def check_the_order_of_arguments() -> None:
    wanted = reduced([part * 2 for part in of_all()], fd.Sum) * 3
    everybody = fd.global_process_set
    assert_same(fd.allreduce(mine(), None, "one", fd.Compression.none, fd.Sum, 2.0, 3.0, everybody), wanted)
    assert_same(fd.allreduce_(mine(), None, "two", fd.Sum, 2.0, 3.0, everybody), wanted)
    handle = fd.allreduce_async(mine(), None, "three", fd.Sum, 2.0, 3.0, everybody)
    assert_same(fd.synchronize(handle), wanted)
    handle = fd.allreduce_async_(mine(), None, "four", fd.Sum, 2.0, 3.0, everybody)
    assert_same(fd.synchronize(handle), wanted)


def check_in_place() -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        for shape in (*sized(), ()):
            op = fd.Sum if dtype is torch.bool else fd.Average
            for reduce_ in (fd.allreduce_, lambda *a, **k: fd.synchronize(fd.allreduce_async_(*a, **k))):
                tensor = mine(shape, dtype)
                address = tensor.data_ptr()
                result = reduce_(tensor, op=op)
                assert result is tensor
                assert tensor.data_ptr() == address
                parts = of_all(shape, dtype)
                assert_same(tensor, torch.stack(parts).any(0) if dtype is torch.bool else reduced(parts, op))


def check_memory_in_any_order() -> None:
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1], lambda t: t.flip(0)):
        wanted = reduced([view(part) for part in of_all((4, 6))], fd.Sum)
        assert_same(fd.allreduce(view(mine((4, 6))), op=fd.Sum), wanted)
        whole = mine((4, 6))
        inside = view(whole)
        fd.allreduce_(inside, op=fd.Sum)
        assert_same(inside, wanted)
    whole = mine((4, 6))
    fd.allreduce_(whole[:, ::2], op=fd.Sum)
    assert_same(whole[:, 1::2], mine((4, 6))[:, 1::2])  # what lies between is left alone
    spread = mine((3, 1)).expand(3, 4)
    assert_same(fd.allreduce(spread, op=fd.Sum), reduced([part.expand(3, 4) for part in of_all((3, 1))], fd.Sum))


def check_scalars_and_nothing_at_all() -> None:
    scalar = fd.allreduce(torch.tensor(float(fd.rank())), op=fd.Sum)
    assert scalar.shape == ()
    assert scalar.item() == sum(range(fd.size()))
    for shape in ((0,), (3, 0), (0, 2)):
        assert_same(fd.allreduce(torch.empty(shape)), torch.empty(shape))
    assert fd.allreduce_(torch.tensor(fd.rank()), op=fd.Max).item() == fd.size() - 1


def check_infinite_and_undefined_numbers_arrive() -> None:
    tensor = torch.tensor([1.0, float("inf"), float("nan") if fd.rank() == 0 else 0.0])
    for op in (fd.Sum, fd.Min, fd.Max):
        ours = fd.allreduce(tensor, op=op)
        assert ours[1].isinf()
        assert ours[2].isnan()


def check_megabytes() -> None:
    numel = 1_000_003
    for op in (fd.Sum, fd.Average):
        assert_same(fd.allreduce(mine((numel,)), op=op), reduced(of_all((numel,)), op))


def check_many_at_once_of_all_dtypes() -> None:
    handles: list[tuple[Any, torch.Tensor]] = []
    for place in range(60):
        dtype = (*INTEGERS, *FLOATS)[place % 6]
        op = (fd.Sum, fd.Average, fd.Max)[place % 3]
        handle = fd.allreduce_async(mine((place,), dtype, place), name=f"many.{place}", op=op)
        handles.append((handle, reduced(of_all((place,), dtype, place), op)))
    for handle, wanted in handles:
        assert_same(fd.synchronize(handle), wanted)


def check_the_same_names_again_and_again() -> None:
    """From the second time on a request is a number; and changes of shape, dtype or operation are noticed."""
    for again in range(12):
        shape, dtype = ((3,), torch.float32) if again % 4 < 3 else ((2, 2), torch.int64)
        op = fd.Sum if again < 8 else fd.Max
        handles = [fd.allreduce_async(mine(shape, dtype, k + again), name=f"again.{k}", op=op) for k in range(5)]
        for k, handle in enumerate(handles):
            assert_same(fd.synchronize(handle), reduced(of_all(shape, dtype, k + again), op))


def check_the_deprecated_way_to_say_the_operation() -> None:
    for reduce_by in (
        lambda average: fd.allreduce(mine(), average),
        lambda average: fd.allreduce_(mine(), average=average),
        lambda average: fd.synchronize(fd.allreduce_async(mine(), average)),
        lambda average: fd.synchronize(fd.allreduce_async_(mine(), average)),
        lambda average: fd.grouped_allreduce([mine()], average)[0],
        lambda average: fd.grouped_allreduce_([mine()], average)[0],
    ):
        for average, op in ((True, fd.Average), (False, fd.Sum)):
            with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as said:
                assert_same(reduce_by(average), reduced(of_all(), op))
            assert [each.filename for each in said] == [__file__], "it names the script's line"


def check_compression_by_16_bits() -> None:
    for compression in (fd.Compression.fp16, fd.Compression.bf16):
        for dtype in FLOATS:
            ours = fd.allreduce(mine((9,), dtype), compression=compression, op=fd.Sum)
            assert_same(ours, reduced(of_all((9,), dtype), fd.Sum))
        fine = torch.full((3,), 1.0001)
        assert_same(fd.allreduce(fine, compression=compression, op=fd.Max), torch.ones(3))
        assert_same(
            fd.allreduce(mine((9,), torch.int64), compression=compression, op=fd.Sum).sum(),
            reduced(of_all((9,), torch.int64), fd.Sum).sum(),
        )
    scattered = fd.reducescatter(mine((fd.size(), 2)), compression=fd.Compression.fp16, op=fd.Sum)
    assert_same(scattered, reduced(of_all((fd.size(), 2)), fd.Sum)[fd.rank() : fd.rank() + 1])


class Doubling(fd.Compression.none):
    """A user's own: sends twice the tensor, and remembers something."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        Doubling.seen.append(tuple(tensor.shape))
        return tensor.reshape(-1) * 2, tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor / 2).view(ctx)


def check_compression_of_the_users_own() -> None:
    Doubling.seen.clear()
    wanted = reduced(of_all((2, 3)), fd.Sum)
    assert_same(fd.allreduce(mine((2, 3)), compression=Doubling, op=fd.Sum), wanted)
    for each in fd.grouped_allreduce([mine((2, 3))] * 2, compression=Doubling, op=fd.Sum):
        assert_same(each, wanted)
    assert Doubling.seen == [(2, 3)] * 3


def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adasum of two, by the paper's formula."""
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def check_adasum() -> None:
    size = fd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match=str(size)):
            fd.allreduce(mine(), op=fd.Adasum)
        return
    for dtype in (torch.float16, torch.float32, torch.float64):
        parts = [part.double() + 3 for part in of_all((10,), dtype)]
        while len(parts) > 1:
            parts = [combined(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        ours = fd.allreduce(mine((10,), dtype) + 3, op=fd.Adasum)
        assert ours.dtype == dtype
        assert_same(ours.double(), parts[0], rtol=2e-3 if dtype is torch.float16 else 1e-5)
    same = fd.allreduce_(torch.ones(4, 2), op=fd.Adasum)
    assert_same(same, torch.ones(4, 2), rtol=1e-6)  # what all agree on is averaged
    apart = torch.zeros(size)
    apart[fd.rank()] = 1.0
    assert_same(fd.allreduce(apart, op=fd.Adasum), torch.ones(size), rtol=1e-6)  # and what is orthogonal summed
