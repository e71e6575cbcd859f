"""Cut a tensor into the chunks that travel around the ring. Pure; ring_schedules.py uses it."""

from __future__ import annotations

from collections.abc import Iterator


def chunk_bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Return one chunk [start, stop) of elements for each rank, in order; together they cover all of `numel`.

    Sizes differ by at most one; with fewer elements than ranks some chunks are empty.
    """
    return [(numel * rank // ranks, numel * (rank + 1) // ranks) for rank in range(ranks)]


def blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) as consecutive runs of `block` elements; only the last may be shorter, none is empty."""
    for low in range(start, stop, block):
        yield low, min(low + block, stop)
