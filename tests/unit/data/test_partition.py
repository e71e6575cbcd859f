"""How global batches are cut: worked examples."""

from __future__ import annotations

import pytest

from farandole.errors import DataError
from farandole.training.data.partition import (
    BatchLayout,
    batches,
    delivered,
    even_slice,
    global_batch_range,
    make_global_batch,
    micro_batches,
)


def test_the_last_global_batch_of_an_epoch_is_short() -> None:
    layout = BatchLayout(10, 4)
    assert global_batch_range(layout, 0) == (0, 4)
    assert global_batch_range(layout, 8) == (8, 10)
    assert layout.global_batches() == 3


def test_a_tail_that_is_dropped_ends_the_epoch_earlier() -> None:
    layout = BatchLayout(10, 4, tail="drop")
    assert (layout.end, layout.global_batches(), layout.next_epoch(8)) == (8, 2, 0)


def test_a_tail_that_is_carried_is_filled_from_the_next_epoch_which_begins_behind_it() -> None:
    layout = BatchLayout(10, 4, tail="carry")
    assert global_batch_range(layout, 8) == (8, 12)
    assert layout.next_epoch(12) == 2
    assert [layout.global_batches(cursor) for cursor in (0, 4, 8, 2, 6)] == [3, 3, 3, 2, 2]
    assert layout.next_epoch(10) == 0


def test_a_tail_has_one_of_three_names() -> None:
    with pytest.raises(DataError, match="tail must be one of short, carry, drop, got 'pad'"):
        BatchLayout(10, 4, tail="pad")  # type: ignore[arg-type]


def test_the_world_need_not_divide_the_global_batch() -> None:
    assert [even_slice(100, 110, rank, 4) for rank in range(4)] == [(100, 102), (102, 105), (105, 107), (107, 110)]


def test_with_fewer_samples_than_workers_some_shares_are_empty() -> None:
    assert [even_slice(0, 2, rank, 4) for rank in range(4)] == [(0, 0), (0, 1), (1, 1), (1, 2)]


def test_with_a_smallest_share_fewer_workers_take_samples() -> None:
    assert [even_slice(0, 5, rank, 4, min_local_batch=2) for rank in range(4)] == [(0, 2), (2, 5), (5, 5), (5, 5)]
    assert [even_slice(0, 1, rank, 3, min_local_batch=2) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]


def test_micro_batches_are_counted_from_the_largest_share() -> None:
    """10 samples over 4 workers: shares of 2 and 3. With at most 2 at a time, all run two loop bodies."""
    assert micro_batches(0, 10, 4, max_local_batch=2) == 2
    global_batch = make_global_batch(BatchLayout(10, 10, max_local_batch=2), epoch=0, cursor=0, rank=0, world=4)
    assert [(b.low, b.high, b.is_last) for b in batches(global_batch)] == [(0, 1, False), (1, 2, True)]


def test_a_micro_batch_without_a_sample_is_a_dummy_batch() -> None:
    layout = BatchLayout(10, 10, max_local_batch=3, min_local_batch=2)
    global_batch = make_global_batch(layout, epoch=0, cursor=0, rank=1, world=3)
    assert (global_batch.low, global_batch.high, global_batch.micro_batches) == (3, 6, 2)
    assert [b.is_dummy for b in batches(global_batch, layout.min_local_batch)] == [False, True]


def test_a_dummy_batch_is_made_of_real_samples_of_its_global_batch() -> None:
    layout = BatchLayout(10, 4, min_local_batch=2)
    (dummy,) = batches(make_global_batch(layout, epoch=0, cursor=4, rank=2, world=3), layout.min_local_batch)
    assert dummy.is_dummy
    assert delivered(dummy, layout.min_local_batch) == (6, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "the data set is empty"),
        ((10, 0), r"global_batch_size must be in 1\.\.10.*got 0"),
        ((10, 11), r"global_batch_size must be in 1\.\.10.*got 11"),
        ((10, 4, None, 5), r"min_local_batch must be in 1\.\.4.*got 5"),
        ((10, 4, 2, 2), r"max_local_batch must be at least 2 \* min_local_batch - 1 = 3, got 2"),
        ((10, 4, 0), "max_local_batch must be at least .* 1, got 0"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_their_values(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        BatchLayout(*arguments)
