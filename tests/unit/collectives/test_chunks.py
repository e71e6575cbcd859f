from __future__ import annotations

import itertools

import pytest

from farandole.training.collectives.ring_schedules import blocks, chunk_bounds


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 1, 2, 6, 7, 1000, 1_000_003])
def test_chunks_cover_every_element_once_in_order(numel: int, ranks: int) -> None:
    bounds = chunk_bounds(numel, ranks)
    assert len(bounds) == ranks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 1, 6, 1000])
def test_chunks_differ_by_one_element_at_most(numel: int, ranks: int) -> None:
    lengths = [stop - start for start, stop in chunk_bounds(numel, ranks)]
    assert max(lengths) - min(lengths) <= 1


def test_blocks_are_full_but_for_the_last_and_never_empty() -> None:
    assert list(blocks(3, 13, 4)) == [(3, 7), (7, 11), (11, 13)]
    assert list(blocks(3, 11, 4)) == [(3, 7), (7, 11)]
    assert list(blocks(5, 5, 4)) == []
