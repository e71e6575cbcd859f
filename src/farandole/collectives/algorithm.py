"""Which way around the ring an all-reduce takes, by its size. Pure; ring.py asks for each tensor."""

from __future__ import annotations

import enum

# What a hop costs beside its bytes, in bytes: some 50 us at some 2 GB/s. Where ranks wait for a core it is more: with
# both algorithms in turns on two busy cores, gathering won up to 192 KB among 2 and 4 ranks, and lost from 384 KB.
_HOP_BYTES = 100_000


class Algorithm(enum.Enum):
    """GATHER  every rank gets all tensors and reduces them itself: `ranks` - 1 hops
    RING    reduce-scatter, then all-gather: twice the hops, with one part of the tensor each
    """

    GATHER = "gather"
    RING = "ring"


def algorithm(nbytes: int, ranks: int) -> Algorithm:
    """The cheaper one for a tensor of `nbytes` among `ranks`, at least 2; the same on all of them.

    A gathering hop carries and reduces the whole tensor, so that all of them together cost (ranks - 1) *
    (hop + 2 * nbytes); the ring's cost 2 * (ranks - 1) * (hop + 1.5 * nbytes / ranks), as it reduces on half of them.
    """
    gather = _HOP_BYTES + 2 * nbytes
    ring = 2 * _HOP_BYTES + 3 * nbytes // ranks
    return Algorithm.GATHER if gather <= ring else Algorithm.RING
