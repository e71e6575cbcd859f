"""The canonical binary tree in which the shards of a global batch are added up, and the division of shards among
workers. Pure.

A sum of floating-point numbers depends on the order of its additions. Here the order belongs to the shards 0, 1, ...,
and not to the workers: neighbours are added in pairs, the results in pairs again, as in the tree

    ((0 + 1) + (2 + 3)) + (4 + 5)                       of 6 shards

A *node* is a sum that occurs in this tree: that of the shards [start, stop). A worker that has several shards adds what
it can, and is left with a *forest*: the nodes whose siblings other workers have. Whoever receives nodes of several
workers continues in the same way, so that each addition of the tree is made once, with the same operands.
"""

from __future__ import annotations

import itertools
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import msgspec

Node: TypeAlias = tuple[int, int]
"""The sum of the shards [start, stop)."""

Forest: TypeAlias = tuple[Node, ...]
"""Nodes in the order of their shards, of which no two can be added to each other."""


class Addition(NamedTuple):
    """An addition of two sums. Sums are numbered: the given ones first, then the results in the order of the
    additions."""

    left: int
    right: int


class Merge(NamedTuple):
    """The additions that are possible among the nodes of several forests.

    Attributes:
        additions: They are carried out in this order.
        forest: The nodes that remain.
        sums: The number of the sum of each of these nodes.
    """

    additions: tuple[Addition, ...]
    forest: Forest
    sums: tuple[int, ...]


def are_siblings(left: Node, right: Node, shards: int) -> bool:
    """Return whether two nodes of the tree over `shards` shards have the same parent, in this order."""
    size = left[1] - left[0]
    # A left child is full: its size is a power of two. A right child may be cut at the last shard.
    return left[1] == right[0] and left[0] % (2 * size) == 0 and right[1] == min(left[1] + size, shards)


@lru_cache(maxsize=1024)
def merge(forests: tuple[Forest, ...], shards: int) -> Merge:
    """Return the additions among the nodes of `forests`, whose sums are numbered one forest after the other."""
    nodes = sorted((node, number) for number, node in enumerate(node for forest in forests for node in forest))
    additions: list[Addition] = []
    stack: list[tuple[Node, int]] = []
    for node, number in nodes:
        stack.append((node, number))
        while len(stack) > 1 and are_siblings(stack[-2][0], stack[-1][0], shards):
            right, left = stack.pop(), stack.pop()
            stack.append(((left[0][0], right[0][1]), len(nodes) + len(additions)))
            additions.append(Addition(left[1], right[1]))
    return Merge(tuple(additions), tuple(node for node, _ in stack), tuple(number for _, number in stack))


class Leaf(NamedTuple):
    """What a worker does with the next of its shards: it adds the last `summands` of its sums to it, the last one
    first, and keeps the result in their place.

    Attributes:
        row: The number of sums that it has before the result.
        summands: Number of sums that are added.
        waits: Nothing is added, and the next shard will be added to this one.
    """

    row: int
    summands: int
    waits: bool


@lru_cache(maxsize=1024)
def leaves(start: int, stop: int, shards: int) -> tuple[Leaf, ...]:
    """Return what a worker with the shards [start, stop) does with each of them, in order. At the end it has the sums
    of the nodes of forest_of(start, stop)."""
    found: list[Leaf] = []
    stack: list[Node] = []
    for shard in range(start, stop):
        node, summands = (shard, shard + 1), 0
        while stack and are_siblings(stack[-1], node, shards):
            node, summands = (stack.pop()[0], node[1]), summands + 1
        next_one = (shard + 1, shard + 2)
        waits = not summands and shard + 1 < stop and are_siblings(node, next_one, shards)
        found.append(Leaf(len(stack), summands, waits))
        stack.append(node)
    return tuple(found)


@lru_cache(maxsize=1024)
def forest_of(start: int, stop: int, shards: int) -> Forest:
    """Return the nodes that remain of the shards [start, stop), at most 2 * log2(shards)."""
    return merge((tuple((shard, shard + 1) for shard in range(start, stop)),), shards).forest


# The division of shards among workers ---------------------------------------------------------------------------------


class Division(msgspec.Struct, frozen=True, dict=True):
    """The shards that each rank computes.

    shards  number of shards of a global batch
    ranges  shards [start, stop) of each rank, by rank: in order, without gaps, some possibly empty
    """

    shards: int
    ranges: tuple[Node, ...]

    @cached_property
    def most(self) -> int:
        """The largest number of shards of a rank."""
        return max(stop - start for start, stop in self.ranges)

    @cached_property
    def forests(self) -> tuple[Forest, ...]:
        """The forest of each rank, by rank."""
        return tuple(forest_of(start, stop, self.shards) for start, stop in self.ranges)

    def rows(self, rank: int) -> int:
        """Return the number of rows that the rank needs for its sums, at least one, for the result. A shard that waits
        for the next one needs none."""
        found = leaves(*self.ranges[rank], self.shards)
        return max((leaf.row for leaf in found if not leaf.waits), default=0) + 1


@lru_cache(maxsize=64)
def divide(shards: int, shares: tuple[int, ...]) -> Division:
    """Divide the shards among ranks in proportion to their `shares`, as evenly as whole shards permit.

    Args:
        shards: Number of shards, at least 1.
        shares: The share of each rank, by rank, in any unit. Not all of them are 0.
    """
    total = sum(shares)
    bounds = [0, *(shards * before // total for before in itertools.accumulate(shares))]
    return Division(shards, tuple(itertools.pairwise(bounds)))


def divide_evenly(shards: int, ranks: int) -> Division:
    """Divide the shards among ranks of equal shares: they get equally many, or one more."""
    return divide(shards, (1,) * ranks)


def shards_that_fit(global_batch_size: int, at_least: int) -> list[int]:
    """Return some numbers of shards, `at_least` or more, into which a global batch can be divided equally."""
    return [number for number in range(at_least, global_batch_size + 1) if global_batch_size % number == 0][:4]
