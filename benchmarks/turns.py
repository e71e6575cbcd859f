"""Several things measured in turns, so that a noisy moment hits all of them. The workers of the benchmarks use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

FEWEST = 3  # turns that are taken, also when the time is up


def turns(most: int, seconds: float) -> Iterator[int]:
    """0, 1, 2, ... on all ranks alike, until `most`, or until rank 0 finds that the time is up."""
    begin_s = time.perf_counter()
    for turn in range(most):
        is_late = time.perf_counter() - begin_s > seconds and turn >= FEWEST
        if agreed(float(is_late)):
            return
        yield turn


def agreed(value: float) -> float:
    """Rank 0's value."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, 0)
    return float(tensor)


def slowest(values: list[float]) -> list[float]:
    """Of each value, that of the rank where it is largest."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def time_ms(operation: Callable[[], object], repeats: int) -> float:
    """Milliseconds for one of `repeats` that follow each other."""
    begin_s = time.perf_counter()
    for _ in range(repeats):
        operation()
    return (time.perf_counter() - begin_s) * 1e3 / repeats
