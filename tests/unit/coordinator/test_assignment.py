"""Ranks, local and cross ranks, neighbours."""

from __future__ import annotations

import pytest

from farandole.base.membership import DataAddress, Placement
from farandole.base.wire.messages import Spawn
from farandole.job.coordinator.capacity import placements, ring_neighbours
from tests.support.told_job import ToldJob


def test_local_and_cross_ranks_are_numbered_as_in_horovod() -> None:
    a = placements([("a", 0), ("a", 1), ("b", 0)])
    b = placements([("b", 0), ("a", 0), ("b", 1), ("c", 0)])
    assert a == [Placement(0, 3, 0, 2, 0, 2), Placement(1, 3, 1, 2, 0, 1), Placement(2, 3, 0, 1, 1, 2)]
    assert [(each.local_rank, each.cross_rank, each.cross_size) for each in b] == [
        (0, 0, 3),
        (0, 1, 3),
        (1, 0, 1),
        (0, 2, 3),
    ]


@pytest.mark.parametrize(
    ("slots", "local_ranks"),
    [
        ((0, 2, 1), [0, 2, 1]),  # the replacement in slot 1 has the last rank
        ((2, 1, 0), [2, 1, 0]),
        ((0, 2), [0, 1]),  # slot 1 is empty
        ((1, 2, 3), [1, 2, 0]),  # only one has to change
        ((3, 5), [0, 1]),
        ((1, 0, 0), [1, 0, 2]),  # cannot be told apart
    ],
)
def test_a_local_rank_is_the_number_of_the_slot_as_long_as_that_is_below_the_local_size(
    slots: tuple[int, ...], local_ranks: list[int]
) -> None:
    places = placements([("a", number) for number in slots])
    assert [each.local_rank for each in places] == local_ranks
    assert {each.local_size for each in places} == {len(slots)}


def local_ranks(told: ToldJob) -> dict[str, int]:
    return {name: start.placement.local_rank for name, start in told.starts().items()}


def test_a_replacement_has_the_local_rank_of_its_slot_from_its_start_to_its_admission() -> None:
    told = ToldJob(3).training().exited("w1")
    (spawn,) = told.sent(Spawn)
    assert spawn.expected is not None
    assert (spawn.expected.rank, spawn.expected.local_rank, spawn.expected.local_size) == (2, 1, 3)
    assert local_ranks(told.ready(2, "w0", "w2")) == {"w0": 0, "w2": 1}
    told.synced("w0", "w2").hello("w3").elastic("w3")
    assert local_ranks(told.ready(3, "w0", "w2")) == {"w0": 0, "w2": 2, "w3": 1}


def test_a_spare_is_started_with_the_local_rank_of_its_slot() -> None:
    told = ToldJob(2, slots=4, spares=2).hello("w0", "w1").elastic("w0")
    places = [(each.expected.local_rank, each.expected.local_size) for each in told.sent(Spawn) if each.expected]
    assert places == [(2, 4), (3, 4)]


def test_slots_of_several_agents_on_one_host_are_numbered_together() -> None:
    told = ToldJob(3, slots=2, takes_agents=True, max_restarts=0).connect("b", 2, host="host-a")
    assert [(each.slot, each.expected.local_rank) for each in told.sent(Spawn) if each.expected] == [
        (0, 0),
        (1, 1),
        (0, 2),
    ]


def test_each_rank_s_neighbours_are_the_ranks_beside_it_on_a_ring() -> None:
    neighbours = ring_neighbours([(f"w{rank}", DataAddress("127.0.0.1", rank)) for rank in range(3)])
    assert [(previous.rank, next.rank) for previous, next in neighbours] == [(2, 1), (0, 2), (1, 0)]
