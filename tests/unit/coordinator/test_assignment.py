"""Ranks, local and cross ranks, neighbours."""

from __future__ import annotations

from farandole.coordinator.capacity import placements, ring_neighbours
from farandole.membership import DataAddress, Placement


def test_local_and_cross_ranks_are_numbered_as_in_horovod() -> None:
    a, b = placements(["a", "a", "b"]), placements(["b", "a", "b", "c"])
    assert a == [Placement(0, 3, 0, 2, 0, 2), Placement(1, 3, 1, 2, 0, 1), Placement(2, 3, 0, 1, 1, 2)]
    assert [(each.local_rank, each.cross_rank, each.cross_size) for each in b] == [
        (0, 0, 3),
        (0, 1, 3),
        (1, 0, 1),
        (0, 2, 3),
    ]


def test_each_rank_s_neighbours_are_the_ranks_beside_it_on_a_ring() -> None:
    neighbours = ring_neighbours([(f"w{rank}", DataAddress("127.0.0.1", rank)) for rank in range(3)])
    assert [(previous.rank, next.rank) for previous, next in neighbours] == [(2, 1), (0, 2), (1, 0)]
