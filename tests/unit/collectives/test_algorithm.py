"""Which algorithm an all-reduce takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from farandole.training.collectives.ring_schedules import is_gathering_cheaper


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, 1000])
def test_tiny_tensors_are_gathered_and_large_ones_go_around_the_ring(ranks: int) -> None:
    assert is_gathering_cheaper(0, ranks) is is_gathering_cheaper(4, ranks) is True
    assert is_gathering_cheaper(1 << 20, ranks) is is_gathering_cheaper(1 << 30, ranks) is False


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_there_is_one_size_at_which_it_changes(ranks: int) -> None:
    taken = [is_gathering_cheaper(nbytes, ranks) for nbytes in range(0, 1 << 19, 1024)]
    changes = [each for each in pairwise(taken) if each[0] is not each[1]]
    assert changes == [(True, False)]


def test_the_more_ranks_the_sooner_it_changes() -> None:
    limits = [sum(is_gathering_cheaper(1024 * kib, ranks) for kib in range(512)) for ranks in range(2, 65)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1]
