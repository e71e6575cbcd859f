"""Divergence: the result of a comparison of states, and which of them is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec


class Divergence(msgspec.Struct, frozen=True):
    """The result of a comparison.

    step      decided steps at that time
    name      the first object that differs, as "model.0.weight"
    objects   number of objects that differ
    ranks     the ranks that differ from the source
    source    the rank that agrees with most ranks, the lowest such rank; only ranks with the most progress count
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
        ranks = ", ".join(map(str, self.ranks))
        return f"at step {self.step} {self.name}{more} of {who} {ranks} differed from that of rank {self.source}"


def choose_right(table: Sequence[Mapping[str, int]], names: Sequence[str], ranks: Collection[int]) -> int:
    """Return the rank that agrees with the majority on most of the objects `names`; among several, the lowest rank.

    Args:
        table: Digests by name, of each rank.
        ranks: The ranks that are considered.
    """
    scores = dict.fromkeys(sorted(ranks), 0)
    for name in names:
        counts = Counter(table[rank].get(name) for rank in ranks)
        for rank in scores:
            scores[rank] += counts[table[rank].get(name)]
    return max(scores, key=lambda rank: scores[rank])


def differing(table: Sequence[Mapping[str, int]], ranks: Collection[int]) -> list[str]:
    """Return the names of the objects that are not equal on all of `ranks`, in their order in the tables.

    Args:
        table: Digests by name, of each rank.
    """
    first, *others = (table[rank] for rank in sorted(ranks))
    names = dict.fromkeys([*first, *(name for other in others for name in other)])
    return [name for name in names if any(other.get(name) != first.get(name) for other in others)]
