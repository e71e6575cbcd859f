"""Ranks whose states should be the same, and are not: which one is right, and what is to be said. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec


class Divergence(msgspec.Struct, frozen=True):
    """What a comparison has found.

    step      decided steps at that time
    name      the first object that differs, as "model.0.weight"
    objects   how many differ
    ranks     those that differ from the source
    source    the rank that most are equal to, the lowest one where several are; only of those that are furthest
    is_trained  parameters or optimizer state differ, not only buffers and tracked tensors
    """

    step: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_trained: bool

    def __str__(self) -> str:
        more = f" and {self.objects - 1} more" if self.objects > 1 else ""
        who = "rank" if len(self.ranks) == 1 else "ranks"
        said = ", ".join(map(str, self.ranks))
        return f"at step {self.step} {self.name}{more} of {who} {said} differed from that of rank {self.source}"


def choose_right(table: Sequence[Mapping[str, int]], names: Sequence[str], ranks: Collection[int]) -> int:
    """Return the rank that has what most have, for most of the objects `names`; of several the lowest one.

    Args:
        table: digests by name, of each rank.
        ranks: those that count.
    """
    scores = dict.fromkeys(sorted(ranks), 0)
    for name in names:
        counts = Counter(table[rank].get(name) for rank in ranks)
        for rank in scores:
            scores[rank] += counts[table[rank].get(name)]
    return max(scores, key=lambda rank: scores[rank])


def differing(table: Sequence[Mapping[str, int]], ranks: Collection[int]) -> list[str]:
    """Names of the objects that are not the same on all of `ranks`, in the order in which they come.

    Args:
        table: digests by name, of each rank.
    """
    first, *others = (table[rank] for rank in sorted(ranks))
    names = dict.fromkeys([*first, *(name for other in others for name in other)])
    return [name for name in names if any(other.get(name) != first.get(name) for other in others)]
