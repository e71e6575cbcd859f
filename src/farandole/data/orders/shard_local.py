"""ShardLocal: one shard of the data set after the other, for samples that are read fastest in this way. Pure."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farandole.data.orders.many import ManyPermutations, derived_seed
from farandole.data.orders.order import Lookup, fingerprint, refuse_other_size, whole_numbers
from farandole.data.partition import Layout
from farandole.data.permutation import Permutation
from farandole.errors import DataError


class ShardLocal:
    """Each sample once per epoch, shard by shard.

    The shards are in a new random order in each epoch, and inside each shard so are its samples. All workers read from
    the same shard, or from two successive ones. Memory is proportional to the number of shards.

    Args:
        shard_sizes: Samples of each shard (file), in the order in which the data set counts them; none may be 0.

    Raises:
        DataError: A shard is empty, or the sizes are not whole numbers.
    """

    def __init__(self, shard_sizes: ArrayLike) -> None:
        self._sizes = whole_numbers("shard_sizes", shard_sizes)
        if self._sizes.min() < 1:
            raise DataError(f"shard number {int(self._sizes.argmin())} has no samples; leave it out of shard_sizes")
        self.identity = f"shard-local-{fingerprint(self._sizes)}"

    def length(self, samples: int) -> int:
        refuse_other_size("shard_sizes", int(self._sizes.sum()), samples)
        return samples

    def bind(self, layout: Layout, seed: int) -> Lookup:
        sizes = self._sizes
        begins = np.cumsum(sizes) - sizes
        # A number that no shard has: the order of the shards is unrelated to that in any of them.
        of_shards = derived_seed(seed, sizes.size)
        inside = ManyPermutations(sizes, seed)

        @lru_cache(maxsize=2)
        def shards_of(epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            shards = Permutation(sizes.size, of_shards, epoch)(np.arange(sizes.size))
            return shards, np.cumsum(sizes[shards])

        def look_up(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            shards, ends = shards_of(epoch)
            which = np.searchsorted(ends, positions, side="right")
            shard = shards[which]
            place = positions - (ends[which] - sizes[shard])
            return begins[shard] + inside(epoch, shard, place)

        Permutation(layout.size, seed, 0)  # raises for an invalid seed
        return look_up
