"""Sets of positions as sorted tuples of intervals [start, stop) with gaps between them. Pure. The trained part of an
epoch is usually one interval, however many samples it has. remainder.py and sampler.py use it."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Intervals: TypeAlias = tuple[tuple[int, int], ...]


def prefix(count: int) -> Intervals:
    """Return the first `count` positions."""
    return ((0, count),) if count else ()


def of_positions(positions: NDArray[np.int64]) -> Intervals:
    """Return the set of these positions, given in any order and any number of times."""
    if not positions.size:
        return ()
    unique = np.unique(positions)
    last = np.flatnonzero(np.diff(unique) > 1)  # of each interval but the very last one
    starts = unique[np.concatenate(([0], last + 1))]
    stops = unique[np.concatenate((last, [unique.size - 1]))] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def union(*sets: Intervals) -> Intervals:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(chain(*sets)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def gaps(intervals: Intervals, size: int, start: int = 0) -> Intervals:
    """Return the positions of [start, size) that are not in `intervals`, which lie inside."""
    ends = [start, *chain(*intervals), size]
    # Without the intervals themselves: every other pair of neighbouring ends.
    return tuple((start, stop) for start, stop in list(pairwise(ends))[::2] if start < stop)


def difference(whole: Intervals, part: Intervals) -> Intervals:
    """Return the positions of `whole` that are not in `part`, which is a part of it."""
    if not whole:
        return ()
    start, stop = whole[0][0], whole[-1][1]
    return gaps(union(part, gaps(whole, stop, start)), stop, start)


def shift(intervals: Intervals, by: int) -> Intervals:
    """Return all positions shifted by `by`."""
    return tuple((start + by, stop + by) for start, stop in intervals)


def measure(intervals: Intervals) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in intervals)


def first(intervals: Intervals, count: int) -> Intervals:
    """Return the `count` lowest positions; all, when there are fewer."""
    taken = []
    for start, stop in intervals:
        if count <= 0:
            break
        taken.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(taken)


def positions_at(intervals: Intervals, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position at each place, when the positions are counted from the lowest one on (int64, same shape).
    Places must be below measure(intervals)."""
    if not places.size:
        return places
    table = np.array(intervals, dtype=np.int64)
    ends = np.cumsum(table[:, 1] - table[:, 0])
    which = np.searchsorted(ends, places, side="right")
    return np.asarray(table[which, 1] - (ends[which] - places))


def contains(intervals: Intervals, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each position whether it is in the set (same shape)."""
    ends = np.fromiter(chain(*intervals), dtype=np.int64)
    return np.asarray(np.searchsorted(ends, positions, side="right") % 2 == 1)


def positions_of(intervals: Intervals) -> NDArray[np.int64]:
    """Return all positions, rising."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in intervals)])
