"""The partition of gradients into buckets: one bucket, or several that are reduced while backward continues. Pure.

Several buckets help where the network moves bytes while the cores compute. Where workers use all cores, or the cores
themselves copy the tensors (shared memory), a reduction in the background takes as much time from backward as it saves,
and one reduction at the end is fastest. Over connections the first steps measure which case applies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from farandole.errors import ConfigError

_LEAST_BYTES = 1 << 20
"""Minimum size of a bucket: a smaller one is mostly latency, since each costs two rounds around the ring."""

_MOST_BYTES = 25 << 20
_FEWEST = 4
"""Minimum number of buckets, if there is enough to cut: about the last bucket is exposed at the end of backward."""


def has_core_to_spare(cores: int, local_size: int, threads: int, is_by_network: bool, is_on_device: bool) -> bool:
    """Return whether a task can run in the background without taking a core from a backward pass.

    cores          cores that this process may use
    local_size     workers of its host
    threads        threads that its computations use
    is_by_network  tensors travel over connections, not through shared memory
    is_on_device   computations run on a device, not on the cores
    """
    return is_on_device or (is_by_network and cores > local_size * threads)


def bucket_sizes(
    total_bytes: int, ranks: int, is_by_network: bool, all_have_cores_to_spare: bool, pinned_bytes: int | None
) -> list[int]:
    """Return the possible values of the least bytes of a bucket, the likeliest choice first; 0: one bucket for
    everything, reduced when backward ends. If there are several values, the first steps show which is fastest.

    total_bytes   of all gradients        ranks  workers
    is_by_network tensors of some rank travel over connections, or gradients are on devices
    pinned_bytes  size requested by the user; None: none
    All ranks must compute the same result, from values known to all of them.
    """
    if pinned_bytes is not None:
        return [pinned_bytes]
    if ranks == 1 or not is_by_network or total_bytes < 2 * _LEAST_BYTES:
        return [0]
    # Each hop of the ring carries 1/ranks of a bucket, which must not become small either.
    least = max(_LEAST_BYTES, ranks * _LEAST_BYTES // 4)
    several = max(least, min(_MOST_BYTES, total_bytes // _FEWEST))
    smaller = max(least, several // 4)
    sizes = [several, smaller, 0] if all_have_cores_to_spare else [0, several]
    return list(dict.fromkeys(sizes))


def cut(sizes_bytes: list[int], kinds: list[str], least_bytes: int) -> list[list[int]]:
    """Cut gradients into buckets: lists of places in `sizes_bytes`, in this order. A bucket has one kind (dtype), and
    is full when it has `least_bytes`; the last bucket of each kind may have less.

    The buckets are in the order in which they become full, if gradients arrive in the given order.
    """
    if least_bytes == 0:
        return [[place for place, kind in enumerate(kinds) if kind == each] for each in dict.fromkeys(kinds)]
    full: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for place, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        filling.setdefault(kind, []).append(place)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] >= least_bytes:
            full.append(filling.pop(kind))
            del filled[kind]
    return full + list(filling.values())


def bytes_of(megabytes: float | str) -> int:
    """Return the number of bytes for FARANDOLE_BUCKET_MB, or the argument of that name. Raises ConfigError."""
    try:
        value = float(megabytes)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"FARANDOLE_BUCKET_MB must be a number of megabytes, or 0 for one bucket, got {megabytes!r}")
    return int(value * (1 << 20))


# Autotune of the bucket size: in the first steps of a job the sizes take turns, then the fastest is kept --------------

_TURNS = 5
"""Turns of each size, besides the first one, which has cold caches and does not count."""

_WORTHWHILE = 0.97
"""Largest ratio of times at which another size replaces the first one: smaller differences are noise."""


class BucketAutotune:
    """The turns of one generation, equal on all ranks: the next size depends on the number of reductions, not on
    seconds.

    sizes  least bytes of a bucket; the first one is the choice without the autotune
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._times_s: list[list[float]] = [[] for _ in sizes]
        self._reduced = 0

    @property
    def is_over(self) -> bool:
        """True when all sizes have had their turns, except for the last turn, which is the current step."""
        return self._reduced >= len(self.sizes) * (1 + _TURNS)

    @property
    def size(self) -> int:
        """The size whose turn it is."""
        return self.sizes[self._reduced % len(self.sizes)]

    def record(self, seconds: float | None) -> None:
        """Record a reduced step: the time from its first gradient to the last sum; None where it is unknown."""
        turn, place = divmod(self._reduced, len(self.sizes))
        if turn and seconds is not None:
            self._times_s[place].append(seconds)
        self._reduced += 1

    def medians_s(self) -> list[float]:
        """Return the median time of each size on this rank; infinite for a size without times."""
        return [statistics.median(times) if times else math.inf for times in self._times_s]


def fastest(sizes: Sequence[int], medians_s: Sequence[Sequence[float]]) -> int:
    """Return the size to keep. `medians_s`: for each rank, one median for each size; the slowest rank counts."""
    slowest = [max(of_size) for of_size in zip(*medians_s, strict=True)]
    best = min(range(len(sizes)), key=lambda place: slowest[place])
    return sizes[best] if slowest[best] < _WORTHWHILE * slowest[0] else sizes[0]
