"""How a world is divided into shards and replicas, and from whom each shard of the state comes when it has changed.
Pure; sharded_state.py asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

import msgspec


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A commit in a worker's memory: shard number `index` of `count`, as of commit `number`."""

    number: int
    index: int
    count: int


class Plan(msgspec.Struct, frozen=True):
    """What all ranks go on from: commit `number`, of which `sources[i]` is the rank that gives shard i."""

    number: int
    sources: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.sources)


def shards_within_hosts(hosts: Sequence[int], limit: int) -> int:
    """The most shards, at most `limit`, so that the workers of each host are whole shard groups.

    hosts  how many workers each host has
    """
    common = gcd(*hosts)
    return max(each for each in range(1, limit + 1) if common % each == 0)


def choose(held: Sequence[Iterable[Held]]) -> Plan | None:
    """The newest commit of which every shard is held by somebody, each from the lowest rank that does. None where there
    is no such commit.

    held  what each rank holds, by rank
    """
    ranks: dict[tuple[int, int], dict[int, int]] = {}  # of a commit and its number of shards: who holds which shard
    for rank, commits in enumerate(held):
        for each in commits:
            ranks.setdefault((each.number, each.count), {}).setdefault(each.index, rank)
    for (number, count), by_index in sorted(ranks.items(), reverse=True):
        if len(by_index) == count:
            return Plan(number, tuple(by_index[index] for index in range(count)))
    return None


def missing(held: Sequence[Iterable[Held]]) -> tuple[int, list[int], int]:
    """Of the newest commit that anybody holds: its number, the shards that nobody does, and how many there are."""
    everything = [each for commits in held for each in commits]
    newest = max(everything, key=lambda each: each.number)
    there = {each.index for each in everything if (each.number, each.count) == (newest.number, newest.count)}
    return newest.number, [index for index in range(newest.count) if index not in there], newest.count


def awaited(plan: Plan, held: Sequence[Iterable[Held]], indices: Sequence[int], count: int) -> set[int]:
    """Shards of the plan that somebody needs and does not have, so that they have to travel.

    indices, count  the shard that each rank is to have now, by rank, and how many there are
    """
    if count != plan.count:
        return set(range(plan.count))
    return {
        index
        for index, commits in zip(indices, held, strict=True)
        if Held(plan.number, index, plan.count) not in commits
    }


def rows(length: int, index: int, count: int) -> tuple[int, int]:
    """Where shard `index` of `count` begins and ends in a dimension of `length`: as torch.chunk divides it, the last
    shards being shorter or empty."""
    each = -(-length // count)
    return min(index * each, length), min((index + 1) * each, length)
