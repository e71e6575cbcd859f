"""The tree of the shards, and what of it each worker computes."""

from __future__ import annotations

import random

import pytest

from farandole.training.collectives.shard_tree import (
    Division,
    Node,
    are_siblings,
    divide,
    divide_evenly,
    leaves,
    merge,
    shards_that_fit,
)


def additions_of(shards: int) -> set[tuple[Node, Node]]:
    """All additions of the tree: neighbours in pairs, and the results in pairs again."""
    found, nodes = set(), [(shard, shard + 1) for shard in range(shards)]
    while len(nodes) > 1:
        pairs = [(nodes[place], nodes[place + 1]) for place in range(0, len(nodes) - 1, 2)]
        found.update(pairs)
        rest = nodes[-1:] if len(nodes) % 2 else []
        nodes = [(left[0], right[1]) for left, right in pairs] + rest
    return found


def additions_of_leaves(start: int, stop: int, shards: int) -> tuple[list[tuple[Node, Node]], list[Node]]:
    """What a worker with these shards adds up, and the nodes that are in its rows at the end."""
    found, rows, waits = [], dict[int, Node](), False
    for shard, leaf in zip(range(start, stop), leaves(start, stop, shards), strict=True):
        node = (shard, shard + 1)
        for row in range(leaf.row + leaf.summands - 1, leaf.row - 1, -1):
            found.append((rows[row], node))
            node = (rows.pop(row)[0], node[1])
        rows[leaf.row] = node
        assert not (leaf.waits and leaf.summands)
        assert waits == (leaf.summands > 0 and found[-leaf.summands][0] == (shard - 1, shard))
        waits = leaf.waits
    assert not waits
    assert list(rows) == list(range(len(rows)))
    return found, list(rows.values())


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31])
def test_every_division_makes_the_additions_of_the_tree_each_once(shards: int) -> None:
    numbers = random.Random(shards)
    divisions = [divide_evenly(shards, ranks) for ranks in range(1, shards + 3)]
    divisions += [
        divide(shards, (*(numbers.randint(0, 5) for _ in range(numbers.randint(1, 6))), 1)) for _ in range(30)
    ]
    for division in divisions:
        found = []
        for rank, (start, stop) in enumerate(division.ranges):
            own, nodes = additions_of_leaves(start, stop, shards)
            assert tuple(nodes) == division.forests[rank]
            assert len(nodes) <= division.rows(rank)
            found += own
        order = list(range(len(division.forests)))
        numbers.shuffle(order)  # as on the way around a ring, or by host
        forest: tuple[Node, ...] = ()
        for rank in order:
            plan = merge((forest, division.forests[rank]), shards)
            nodes = [*forest, *division.forests[rank]]
            for left, right in plan.additions:
                found.append((nodes[left], nodes[right]))
                nodes.append((nodes[left][0], nodes[right][1]))
            forest = plan.forest
        assert forest == ((0, shards),)
        assert len(found) == len(set(found))
        assert set(found) == additions_of(shards)


def test_shards_are_divided_in_order_and_as_evenly_as_possible() -> None:
    assert divide_evenly(8, 3).ranges == ((0, 2), (2, 5), (5, 8))
    assert divide_evenly(4, 4).most == 1
    assert divide_evenly(2, 3).ranges == ((0, 0), (0, 1), (1, 2))
    assert divide(8, (1, 3, 4)).ranges == ((0, 1), (1, 4), (4, 8))
    assert divide(8, (0, 1)) == Division(8, ((0, 0), (0, 8)))


def test_a_worker_with_an_aligned_power_of_two_of_shards_sends_one_sum() -> None:
    assert divide_evenly(16, 4).forests == (((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),))
    assert [divide(16, (shards, 16 - shards)).rows(0) for shards in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert divide_evenly(8, 3).forests[1] == ((2, 4), (4, 5))


def test_the_last_node_of_a_level_may_be_cut() -> None:
    assert are_siblings((0, 4), (4, 5), 5)
    assert not are_siblings((0, 2), (2, 3), 8)
    assert not are_siblings((2, 4), (4, 6), 8)


def test_numbers_of_shards_that_fit_a_global_batch() -> None:
    assert shards_that_fit(24, 4) == [4, 6, 8, 12]
    assert shards_that_fit(7, 2) == [7]
    assert shards_that_fit(7, 8) == []
