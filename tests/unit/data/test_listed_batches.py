"""The batches of an epoch as samplers list them: global batches, and the rest of an epoch for any number of workers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from farandole.errors import ConfigError
from farandole.training.data.listed_batches import ListedBatches, of_lists
from farandole.training.data.partition import BatchLayout, batches, make_global_batch


def lists_of(workers: int, sizes: list[int]) -> list[list[list[int]]]:
    """Each sample once, the workers by turns."""
    ids = iter(range(workers * sum(sizes)))
    columns = [[next(ids) for _ in range(workers)] for _ in range(sum(sizes))]
    bounds = [0, *np.cumsum(sizes).tolist()]
    return [
        [[column[rank] for column in columns[low:high]] for low, high in itertools.pairwise(bounds)]
        for rank in range(workers)
    ]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@given(st.integers(1, 4), SIZES, st.integers(1, 3))
@settings(deadline=None, max_examples=80)
def test_global_batches_follow_each_other_and_hold_the_batches_of_all_ranks(
    workers: int, sizes: list[int], batches_of_step: int
) -> None:
    lists = lists_of(workers, sizes)
    found = of_lists(lists, workers * sum(sizes)).added_up(batches_of_step)
    position, step = 0, 0
    while position < found.size:
        stop = found.stop(position)
        taken = slice(step * batches_of_step, (step + 1) * batches_of_step)
        expected = [index for batches in lists for batch in batches[taken] for index in batch]
        assert found.look_up(np.arange(position, stop)).tolist() == expected
        assert found.batches_of(position) == sizes[taken]
        step += 1
        position = stop
        assert found.steps_from(position) == found.steps_from(0) - step
    assert position == found.size


@given(st.integers(1, 4), st.integers(1, 5), SIZES, st.data())
@settings(deadline=None, max_examples=80)
def test_the_rest_of_an_epoch_is_shared_by_any_number_of_workers(
    workers: int, now: int, sizes: list[int], data: st.DataObject
) -> None:
    found = of_lists(lists_of(workers, sizes), workers * sum(sizes))
    done = data.draw(st.integers(0, len(sizes)))
    position = workers * sum(sizes[:done])
    shares = [found.rest(position, rank, now) for rank in range(now)]
    assert len({tuple(map(len, share)) for share in shares}) == 1
    trained = [index for share in shares for batch in share for index in batch]
    left = set(found.look_up(np.arange(position, found.size)).tolist())
    assert set(trained) == left
    assert len(trained) - len(left) < now
    if now == workers:
        assert shares == [batches[done:] for batches in lists_of(workers, sizes)]


def test_the_rest_has_no_batch_of_one_sample_where_the_sampler_has_none() -> None:
    found = of_lists(lists_of(2, [4, 4, 4]), 24)
    assert [len(batch) for batch in found.rest(8, 0, 3)] == [4, 2]
    assert [len(batch) for batch in found.rest(16, 0, 3)] == [3]
    assert [len(batch) for batch in of_lists(lists_of(3, [3, 4]), 21).rest(0, 0, 4)] == [4, 2]
    assert [len(batch) for batch in of_lists(lists_of(2, [4, 6]), 20).rest(8, 0, 1)] == [6, 6]
    assert [len(batch) for batch in of_lists(lists_of(2, [2, 5]), 14).rest(4, 0, 3)] == [4]


def test_batches_travel_as_bytes() -> None:
    found = ListedBatches(np.array([[3, 2**40], [1, 0]]), np.array([2]))
    again = ListedBatches.unpack(found.pack())
    assert again.digest == found.digest
    assert again.rest(0, 0, 2) == [[3, 2**40]]


def test_samples_that_are_left_out_or_come_again_are_known() -> None:
    found = of_lists([[[0, 4]], [[4, 4]]], 6)
    assert found.left_out(6).tolist() == [1, 2, 3, 5]
    assert found.repeated().tolist() == [4, 4]


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        ([[[0]], [[1], [2]]], "1 batches for rank 0 and 2 for rank 1"),
        ([[[0, 1]], [[2]]], "different sizes for one step: 2 samples for rank 0 and 1 for rank 1"),
        ([[], []], "no batch"),
        ([[[]], [[]]], "an empty batch"),
        ([[[0]], [[9]]], "sample 9, and the data set of its DataLoader has 5"),
    ],
)
def test_lists_that_make_no_steps_are_refused(lists: list[list[list[int]]], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        of_lists(lists, 5)


def test_equal_parts() -> None:
    found = of_lists(lists_of(3, [4, 4, 2]), 30)
    assert found.divides_equally(0, 3)
    assert found.divides_equally(0, 6)
    assert not found.divides_equally(0, 4)
    assert found.divides_equally(24, 6)


@given(st.integers(1, 4), SIZES, st.integers(1, 3))
@settings(deadline=None, max_examples=80)
def test_steps_that_add_up_batches_of_different_sizes_are_known(workers: int, sizes: list[int], added: int) -> None:
    found = of_lists(lists_of(workers, sizes), workers * sum(sizes)).added_up(added)
    position, steps = 0, [sizes[each : each + added] for each in range(0, len(sizes), added)]
    for number in range(len(steps)):
        assert found.adds_unequal(position) == any(len(set(each)) > 1 for each in steps[number:])
        position = found.stop(position)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None, max_examples=80)
def test_a_step_has_as_many_loop_bodies_for_any_number_of_workers(
    workers: int, now: int, added: int, size: int
) -> None:
    """The script counts them, and calls step() after so many."""
    found = of_lists(lists_of(workers, [size] * 2 * added), workers * size * 2 * added).added_up(added)
    layout = BatchLayout(found.size, found.largest_global_batch, None, min(2, found.smallest), "short", listed=found)
    for start in (0, found.stop(0)):
        made = [make_global_batch(layout, 0, start, rank, now) for rank in range(now)]
        bodies = [batches(each, layout.min_local_batch) for each in made]
        assert {len(each) for each in bodies} == {added}
        assert sum(each.weight for rank in bodies for each in rank) == pytest.approx(1)
        covered = sorted(position for rank in bodies for each in rank for position in range(each.low, each.high))
        assert covered == list(range(start, found.stop(start)))
