"""The division of a world into shards and replicas, and the source of each shard of the state after a change. Pure;
sharded_state.py uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

import msgspec


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A commit in a worker's memory: shard number `index` of `count`, as of commit `number`."""

    number: int
    index: int
    count: int


class ShardPlan(msgspec.Struct, frozen=True):
    """The commit from which all ranks continue: its `number`, and in `sources[i]` the rank that provides shard i."""

    number: int
    sources: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.sources)


def shards_within_hosts(hosts: Sequence[int], limit: int) -> int:
    """Return the most shards, at most `limit`, so that the workers of each host form whole shard groups.

    hosts  number of workers of each host
    """
    common = gcd(*hosts)
    return max(each for each in range(1, limit + 1) if common % each == 0)


def choose(held: Sequence[Iterable[Held]]) -> ShardPlan | None:
    """Return the newest commit of which every shard has a holder, each shard from the lowest rank that holds it. None
    where there is no such commit.

    held  the commits that each rank holds, by rank
    """
    ranks: dict[tuple[int, int], dict[int, int]] = {}  # by commit and number of shards: the rank of each shard
    for rank, commits in enumerate(held):
        for each in commits:
            ranks.setdefault((each.number, each.count), {}).setdefault(each.index, rank)
    for (number, count), by_index in sorted(ranks.items(), reverse=True):
        if len(by_index) == count:
            return ShardPlan(number, tuple(by_index[index] for index in range(count)))
    return None


def missing(held: Sequence[Iterable[Held]]) -> tuple[int, list[int], int]:
    """Return the number of the newest commit that any rank holds, its shards without a holder, and its number of
    shards."""
    everything = [each for commits in held for each in commits]
    newest = max(everything, key=lambda each: each.number)
    there = {each.index for each in everything if (each.number, each.count) == (newest.number, newest.count)}
    return newest.number, [index for index in range(newest.count) if index not in there], newest.count


def awaited(plan: ShardPlan, held: Sequence[Iterable[Held]], indices: Sequence[int], count: int) -> set[int]:
    """Return the shards of the plan that a rank needs and does not have, so that they have to be broadcast.

    indices, count  number of each rank's new shard, by rank, and the number of shards
    """
    if count != plan.count:
        return set(range(plan.count))
    return {
        index
        for index, commits in zip(indices, held, strict=True)
        if Held(plan.number, index, plan.count) not in commits
    }


def rows(length: int, index: int, count: int) -> tuple[int, int]:
    """Return begin and end of shard `index` of `count` in a dimension of `length`. As in torch.chunk, the last shards
    are shorter or empty."""
    each = -(-length // count)
    return min(index * each, length), min((index + 1) * each, length)
