"""Which of several states is right, and what is said."""

from __future__ import annotations

import pytest

from farandole.training.state.sync import Divergence, choose_right, differing

pytestmark = pytest.mark.core


def tables(*values: str) -> list[dict[str, int]]:
    """Of each rank, one letter for each of its objects."""
    return [{str(place): ord(letter) for place, letter in enumerate(each)} for each in values]


def test_the_lowest_rank_of_the_majority_is_right() -> None:
    assert choose_right(tables("b", "a", "a"), "0", range(3)) == 1
    assert choose_right(tables("b", "a", "b", "a"), "0", (3, 1, 2)) == 1


def test_without_a_majority_it_is_the_lowest_rank() -> None:
    assert choose_right(tables("a", "b"), "0", range(2)) == 0
    assert choose_right(tables("c", "b", "a", "a", "b"), "0", range(1, 5)) == 1


def test_a_rank_that_is_right_in_everything_is_found_where_each_other_one_is_wrong_somewhere() -> None:
    assert choose_right(tables("xbc", "axc", "abc"), "012", range(3)) == 2


def test_objects_are_named_in_the_order_of_the_first_rank_and_those_that_it_lacks_last() -> None:
    table = [{"w": 1, "b": 2}, {"b": 9, "w": 1, "m": 3}, {"w": 7, "b": 2}]
    assert differing(table, (0, 1)) == ["b", "m"]
    assert differing(table, (0, 1, 2)) == ["w", "b", "m"]
    assert differing(table, (2,)) == []


def test_it_names_the_object_and_the_ranks() -> None:
    found = Divergence(12, "model.0.weight", 3, (1, 2), 0, is_trained=True)
    assert str(found) == "at step 12 model.0.weight and 2 more of ranks 1, 2 differed from that of rank 0"
