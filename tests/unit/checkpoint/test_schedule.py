"""How often, in words, and when the next one is due."""

from __future__ import annotations

import pytest

from farandole.base.checkpoints.schedule import Due, Every, parse_every
from farandole.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("30s", Every(seconds=30)),
        ("10m", Every(seconds=600)),
        ("1.5h", Every(seconds=5400)),
        ("500steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
    ],
)
def test_times_and_steps_are_understood(text: str, every: Every) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", ["", "10", "m", "0s", "-1m", "0steps", "1.5steps", "10 minutes", "nans"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 30s, 10m or 1h"):
        parse_every(text)


def test_by_time_it_is_due_when_so_much_has_passed_since_the_last_one() -> None:
    due = Due(Every(seconds=10), now_s=100, step=0)
    assert [due.is_due(now, 0) for now in (109, 110, 200)] == [False, True, True]
    due.restart(200, 0)
    assert not due.is_due(209, 0)


def test_by_steps_it_is_due_at_each_multiple_also_when_one_was_jumped_over() -> None:
    due = Due(Every(steps=10), now_s=0, step=7)
    assert [due.is_due(0, step) for step in (9, 10, 13)] == [False, True, True]
    due.restart(0, 13)
    assert [due.is_due(0, step) for step in (19, 20)] == [False, True]
