"""Sizes of buckets take turns in the first steps, and the fastest one is kept."""

from __future__ import annotations

import math

import pytest

from farandole.training.optim.bucket_size import BucketAutotune, fastest

pytestmark = pytest.mark.core


def tried(seconds: dict[int, list[float | None]]) -> BucketAutotune:
    """A whole autotune; each list begins with the turn that does not count."""
    autotune, turns = BucketAutotune(list(seconds)), {size: iter(times) for size, times in seconds.items()}
    while not autotune.is_over:
        autotune.record(next(turns[autotune.size]))
    assert all(next(left, "none") == "none" for left in turns.values())
    return autotune


def test_all_have_as_many_turns_and_the_first_does_not_count() -> None:
    autotune = tried({7: [99, 1, 2, 3, 4, 5], 0: [99, 2, 2, 2, 2, 9]})
    assert autotune.medians_s() == [3, 2]


def test_what_was_not_measured_is_no_candidate() -> None:
    autotune = tried({7: [None] * 6, 0: [None, 4, None, 4, 4, 4]})
    assert autotune.medians_s() == [math.inf, 4]
    assert fastest([7, 0], [autotune.medians_s()] * 2) == 0
    assert fastest([7, 0], [[math.inf] * 2] * 2) == 7


def test_the_slowest_rank_counts() -> None:
    assert fastest([0, 7], [[1.0, 0.1], [1.0, 0.5]]) == 7
    assert fastest([0, 7], [[1.0, 0.1], [1.0, 1.5]]) == 0


def test_a_difference_like_noise_changes_nothing() -> None:
    assert fastest([0, 7, 8], [[1.0, 0.98, 0.99]]) == 0
    assert fastest([0, 7, 8], [[1.0, 0.96, 0.95]]) == 8
