"""Cut a tensor into the chunks that travel around the ring, and choose the algorithm of an all-reduce by the tensor's
size. Pure.
"""

from __future__ import annotations

import enum
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


# The algorithm of an all-reduce ---------------------------------------------------------------------------------------

# The cost of a hop beside its bytes, in bytes: about 50 us at about 2 GB/s. It is higher where ranks wait for a core:
# with both algorithms in turns on two busy cores, gathering won up to 192 KB among 2 and 4 ranks, and lost from 384 KB.
_HOP_BYTES = 100_000


class Algorithm(enum.Enum):
    """The algorithms of an all-reduce.

    GATHER: every rank gets all tensors and reduces them itself: `ranks` - 1 hops.
    RING: reduce-scatter, then all-gather: twice the hops, with one part of the tensor each.
    """

    GATHER = "gather"
    RING = "ring"


def choose_algorithm(nbytes: int, ranks: int) -> Algorithm:
    """Return the cheaper algorithm for a tensor of `nbytes` among `ranks`, at least 2; the same on all of them.

    A gathering hop carries and reduces the whole tensor, so that all hops together cost (ranks - 1) * (hop + 2 *
    nbytes). The hops of the ring cost 2 * (ranks - 1) * (hop + 1.5 * nbytes / ranks), as half of them reduce.
    """
    gather = _HOP_BYTES + 2 * nbytes
    ring = 2 * _HOP_BYTES + 3 * nbytes // ranks
    return Algorithm.GATHER if gather <= ring else Algorithm.RING
