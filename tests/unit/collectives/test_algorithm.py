"""Which algorithm an all-reduce takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from farandole.training.collectives.chunks import Algorithm, choose_algorithm


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64, 1000])
def test_tiny_tensors_are_gathered_and_large_ones_go_around_the_ring(ranks: int) -> None:
    assert choose_algorithm(0, ranks) is choose_algorithm(4, ranks) is Algorithm.GATHER
    assert choose_algorithm(1 << 20, ranks) is choose_algorithm(1 << 30, ranks) is Algorithm.RING


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_there_is_one_size_at_which_it_changes(ranks: int) -> None:
    taken = [choose_algorithm(nbytes, ranks) for nbytes in range(0, 1 << 19, 1024)]
    changes = [each for each in pairwise(taken) if each[0] is not each[1]]
    assert changes == [(Algorithm.GATHER, Algorithm.RING)]


def test_the_more_ranks_the_sooner_it_changes() -> None:
    limits = [
        sum(choose_algorithm(1024 * kib, ranks) is Algorithm.GATHER for kib in range(512)) for ranks in range(2, 65)
    ]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1]
