"""Iterators and generators of the script: what can be brought back is, here and on other workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from farandole.integrations.torchrun.in_place.script_holder import Holder
from farandole.integrations.torchrun.in_place.script_state import ScriptState

MAKERS: dict[str, Callable[[], Any]] = {
    "count": lambda: itertools.count(3, 2),
    "list": lambda: iter([5, 6, 7, 8, 9]),
    "tuple": lambda: iter((5, 6, 7, 8, 9)),
    "range": lambda: iter(range(10, 20, 2)),
    "torch": lambda: torch.Generator().manual_seed(1),
    "random": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "numpy of old": lambda: np.random.RandomState(1),
}


def draw(value: Any) -> float:
    if isinstance(value, torch.Generator):
        return float(torch.rand((), generator=value))
    if isinstance(value, random.Random | np.random.RandomState | np.random.Generator):
        return float(value.random())
    return float(next(value))


def worker(make: Callable[[], Any]) -> tuple[dict[str, Any], ScriptState]:
    variables = {"it": make()}
    return variables, ScriptState(list, lambda: [Holder("", variables, "globals")])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("is_due", [True, False])
def test_a_loop_body_that_comes_again_draws_the_same(make: Callable[[], Any], is_due: bool) -> None:
    variables, state = worker(make)
    state.take(is_due=True)
    draw(variables["it"])
    state.take(is_due=is_due)
    first = [draw(variables["it"]) for _ in range(3)]
    state.roll_back()
    assert draw(variables["it"]) == first[0]
    state.roll_back()
    assert [draw(variables["it"]) for _ in range(3)] == first


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_newcomer_draws_what_the_others_draw(make: Callable[[], Any]) -> None:
    variables, state = worker(make)
    theirs, newcomer = worker(make)
    for each, values in ((state, variables), (newcomer, theirs)):
        each.take(is_due=True)
        draw(values["it"])
        each.take(is_due=True)
    draw(variables["it"])
    loaded, missing = newcomer.apply(state.pack())
    assert (loaded, missing) == (["it"], [])
    assert draw(theirs["it"]) == draw(variables["it"])


def test_an_iterator_that_has_ended_comes_again() -> None:
    variables, state = worker(lambda: iter([1, 2]))
    state.take(is_due=True)
    assert list(variables["it"]) == [1, 2]
    state.roll_back()
    assert list(variables["it"]) == [1, 2]


def temperatures() -> Iterator[float]:
    value = 1.0
    while True:
        value *= 0.9
        yield value


def test_a_generator_that_has_gone_on_in_a_body_that_came_again_is_named_once() -> None:
    variables, state = worker(temperatures)
    state.take(is_due=True)
    assert not state.going_on
    draw(variables["it"])
    state.roll_back()
    assert state.take_gone_on() == ["it"]
    assert state.take_gone_on() == []


def test_a_generator_goes_on_in_a_loop_body_or_between_epochs() -> None:
    variables, state = worker(temperatures)
    state.take(is_due=True)
    state.take(is_due=True)
    assert not state.going_on
    draw(variables["it"])
    state.take(is_due=False)
    assert state.going_on == {"it"}
