"""How parameters are divided among workers, and what is sent where the number of workers changes: decisions only.

FSDP2 cuts each parameter along its first dimension, as torch.chunk() does: all shards have as many rows as the first
one, but for the last ones, which may have fewer, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def rows_of(rows: int, size: int, index: int) -> range:
    """Return the rows of a parameter that shard `index` of `size` has."""
    each = -(-rows // size)
    return range(min(index * each, rows), min((index + 1) * each, rows))


def mirrors(places: Sequence[tuple[int, int]]) -> list[int]:
    """Return, by rank, which rank mirrors its shard: one on another host, where hosts have as many workers. `places`:
    by rank, the local rank and the number of the host."""
    order = sorted(range(len(places)), key=lambda rank: (places[rank], rank))
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [following[rank] for rank in range(len(places))]


class Held(NamedTuple):
    """A division in which a worker holds a shard, and the mirror of another one.

    generation  number of the generation for which it was made
    size        number of its shards
    shard       the worker's own shard
    mirrored    the shard whose mirror it has; -1: none
    version     decided steps; -1: a division that no worker has agreed on
    """

    generation: int
    size: int
    shard: int
    mirrored: int
    version: int


class Source(NamedTuple):
    """Who sends a shard: a rank, from its own shard or from its mirror."""

    rank: int
    is_mirror: bool


class Plan(NamedTuple):
    """Where each shard of the last complete division comes from.

    generation, size  of that division
    version           decided steps: the most that any worker has
    sources           by shard
    """

    generation: int
    size: int
    version: int
    sources: tuple[Source, ...]


def choose(held: Sequence[Sequence[Held]]) -> Plan | None:
    """Return a division of which each shard has a holder, the safest one: that with the fewest shards which have only
    one holder, and the newest of several such. None: there is none. `held`: by rank.

    What has fewer steps than anything else is of no use: its worker was not among those that agreed on the last step.
    """
    version, best = _last_version(held), (0, 0)
    chosen: Plan | None = None
    for generation in {each.generation for worker in held for each in worker}:
        found = _holders(generation, version, held)
        if not all(found):
            continue
        safety = -sum(len(each) == 1 for each in found), generation
        if chosen is None or safety > best:
            best, chosen = safety, Plan(generation, len(found), version, tuple(each[0] for each in found))
    return chosen


def lost(held: Sequence[Sequence[Held]]) -> tuple[list[int], int]:
    """Return the shards that have no holder, and the number of shards, where choose() returns None.

    These are those of the oldest division, since each shard of it was there before workers were lost. Of a newer one
    some may not have been made yet.
    """
    version = _last_version(held)
    generation = min(each.generation for worker in held for each in worker if each.version == version)
    found = _holders(generation, version, held)
    return [index for index, each in enumerate(found) if not each], len(found)


def _last_version(held: Sequence[Sequence[Held]]) -> int:
    return max(each.version for worker in held for each in worker)


def _holders(generation: int, version: int, held: Sequence[Sequence[Held]]) -> list[list[Source]]:
    """Return who has each shard of a division, its owner before its mirror."""
    of = [(rank, each) for rank, worker in enumerate(held) for each in worker if each.generation == generation]
    usable = [(rank, each) for rank, each in of if each.version == version]
    found: list[list[Source]] = [[] for _ in range(of[0][1].size)]
    for rank, each in usable:
        found[each.shard].append(Source(rank, False))
    for rank, each in usable:
        if each.mirrored >= 0:
            found[each.mirrored].append(Source(rank, True))
    return found


class Piece(NamedTuple):
    """Rows of a parameter that a rank needs: rows `begin` to `end` (of the whole parameter) of an old shard."""

    shard: int
    begin: int
    end: int


def pieces(rows: int, old_size: int, wanted: range) -> list[Piece]:
    """Return the pieces of old shards that make up the wanted rows, in their order."""
    found = []
    for shard in range(old_size):
        there = rows_of(rows, old_size, shard)
        begin, end = max(there.start, wanted.start), min(there.stop, wanted.stop)
        if begin < end:
            found.append(Piece(shard, begin, end))
    return found


def source_for(rank: int, shard: int, plan: Plan, held: Sequence[Sequence[Held]]) -> Source:
    """Return who gives a shard to a rank: itself, if it has it, own or as a mirror."""
    for each in held[rank]:
        if each.generation == plan.generation and each.version == plan.version:
            if each.shard == shard:
                return Source(rank, False)
            if each.mirrored == shard:
                return Source(rank, True)
    return plan.sources[shard]
