"""Sets as intervals are sets."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, strategies as st

from farandole.training.data import intervals

SIZE = 30
sets = st.frozensets(st.integers(0, SIZE - 1))


def of(positions: frozenset[int]) -> intervals.Intervals:
    return intervals.of_positions(np.array(sorted(positions, reverse=True) * 2, dtype=np.int64))


@given(sets)
def test_a_set_comes_back_as_it_was_in_the_fewest_intervals(some: frozenset[int]) -> None:
    packed = of(some)
    assert intervals.positions_of(packed).tolist() == sorted(some)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(packed))
    assert intervals.measure(packed) == len(some)


@given(sets, sets, sets)
def test_unions_and_gaps_are_those_of_sets(a: frozenset[int], b: frozenset[int], c: frozenset[int]) -> None:
    assert intervals.union(of(a), of(b), of(c)) == of(a | b | c)
    assert intervals.gaps(of(a), SIZE) == of(frozenset(range(SIZE)) - a)


@given(sets, st.integers(0, SIZE + 1))
def test_the_first_ones_and_the_ones_at_places_are_counted_from_the_lowest(some: frozenset[int], count: int) -> None:
    rising = sorted(some)
    assert intervals.first(of(some), count) == of(frozenset(rising[:count]))
    assert intervals.positions_at(of(some), np.arange(len(some))).tolist() == rising


@given(sets)
def test_every_position_is_in_it_or_not(some: frozenset[int]) -> None:
    assert intervals.contains(of(some), np.arange(SIZE)).tolist() == [number in some for number in range(SIZE)]


def test_nothing_is_the_prefix_of_length_0() -> None:
    assert intervals.prefix(0) == () == intervals.gaps((), 0)
    assert intervals.prefix(3) == ((0, 3),)
