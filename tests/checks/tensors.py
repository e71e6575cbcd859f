"""What each rank contributes in the checks, so that every rank can compute what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

import farandole as fd

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)
SIZED = (0,), (1,), (7,), (2, 3), (2, 1, 4)
"""Shapes, one without elements among them."""


def sized() -> tuple[tuple[int, ...], ...]:
    """SIZED, or some of them among more than two ranks: for checks of every dtype, each with every shape. More ranks
    change how tensors travel, and not what their shapes do."""
    return SIZED if fd.size() == 2 else ((0,), (2, 3))


_COMBINE: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    fd.Sum: torch.add,
    fd.Min: torch.minimum,
    fd.Max: torch.maximum,
    fd.Product: torch.mul,
}


def of_rank(rank: int, shape: Sequence[int] = (5,), dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, -2 to 2 (0 to 4 where there is no sign): exact in every dtype, summed or multiplied."""
    numbers = torch.arange(torch.Size(shape).numel()) * 3 + rank * 7 + seed
    numbers = numbers % 5 - (0 if dtype in (torch.uint8, torch.bool) else 2)
    return numbers.reshape(tuple(shape)).to(dtype)


def mine(shape: Sequence[int] = (5,), dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """of_rank() of this rank."""
    return of_rank(fd.rank(), shape, dtype, seed)


def of_all(
    shape: Sequence[int] = (5,), dtype: torch.dtype = torch.float32, seed: int = 0, ranks: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """of_rank() of each rank, or of those given."""
    return [of_rank(rank, shape, dtype, seed) for rank in (range(fd.size()) if ranks is None else ranks)]


def reduced(parts: Sequence[torch.Tensor], op: int) -> torch.Tensor:
    """What should come of them. Averages of integers are truncated toward zero."""
    if op != fd.Average:
        return reduce(_COMBINE[op], parts)
    total = reduce(torch.add, [part.double() if part.is_floating_point() else part for part in parts])
    if total.is_floating_point():
        return (total / len(parts)).to(parts[0].dtype)
    return torch.div(total, len(parts), rounding_mode="trunc")


def assert_same(ours: torch.Tensor, wanted: torch.Tensor, rtol: float = 0.0) -> None:
    """Same dtype and shape, and the same numbers (but for rounding by `rtol`)."""
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=rtol)
