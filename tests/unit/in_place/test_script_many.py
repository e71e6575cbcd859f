"""Values beyond a limit of what is copied at each boundary one by one return, or are named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from farandole.integrations.torchrun.in_place.script_holder import Holder
from farandole.integrations.torchrun.in_place.script_search import SAMPLED_BYTES, Digests
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.training.collectives import world


class Note:
    def __init__(self) -> None:
        self.count = 0


def count(note: Note) -> None:
    note.count += 1


def append(items: list[int]) -> None:
    items.append(1)


def add(values: Any) -> None:
    values[1] += 1


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], int], bool]] = {
    "lists of a history": (lambda: {n: [] for n in range(1500)}, lambda v: append(v[700]), lambda v: len(v[700]), True),
    "lists in a list": (lambda: [[] for _ in range(1500)], lambda v: append(v[700]), lambda v: len(v[700]), True),
    "objects in a list": (lambda: [Note() for _ in range(1500)], lambda v: count(v[700]), lambda v: v[700].count, True),
    "sets in lists": (
        lambda: [[set()] for _ in range(1500)],
        lambda v: v[700][0].add(len(v[700][0])),
        lambda v: len(v[700][0]),
        True,
    ),
    "one of many lists": (
        lambda: {n: [] for n in range(700)},
        lambda v: append(v[sum(map(len, v.values()))]),
        lambda v: sum(map(len, v.values())),
        True,
    ),
    "one of many arrays": (
        lambda: [np.zeros(2) for _ in range(300)],
        lambda v: add(v[int(sum(each[1] for each in v))]),
        lambda v: int(sum(each[1] for each in v)),
        True,
    ),
    "one number of very many": (lambda: [0] * 30_000, add, lambda v: v[1], True),
    "a long array of Python": (lambda: bytearray(2 << 20), add, lambda v: v[1], True),
    "tensors in a list": (
        lambda: [torch.zeros(2) for _ in range(1500)],
        lambda v: add(v[700]),
        lambda v: int(v[700][1]),
        False,
    ),
    "very many lists": (lambda: [[] for _ in range(9000)], lambda v: append(v[700]), lambda v: len(v[700]), False),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changes_in_a_body_that_comes_again_returns_or_is_named(monkeypatch: Any, case: str) -> None:
    remarks = list[str]()
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(on_remark=lambda _, text: remarks.append(text)))
    make, body, number, is_exact = CASES[case]
    value = make()
    variables = {"value": value}
    state = ScriptState(list, lambda: [Holder("", variables, "globals")])
    for step in range(5):
        state.take(is_due=step in (1, 2, 4))
        state.look()
        body(value)
    state.take(is_due=False)
    body(value)
    body(value)
    state.roll_back()
    assert (number(value) == 5, bool(remarks)) == (is_exact, not is_exact)


@pytest.mark.parametrize("make", [lambda: [0] * 30_000, lambda: np.zeros(20_000), lambda: bytearray(2 << 20)])
def test_a_first_change_since_the_last_search_is_named(monkeypatch: Any, make: Callable[[], Any]) -> None:
    remarks = list[str]()
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(on_remark=lambda _, text: remarks.append(text)))
    value = make()
    variables = {"value": value}
    state = ScriptState(list, lambda: [Holder("", variables, "globals")])
    for step in range(5):
        state.take(is_due=step in (1, 2))
        state.look()
    value[1] += 1
    state.roll_back()
    assert value[1] == 0 or remarks


def test_a_newcomer_is_told_of_objects_in_a_list_that_it_lacks() -> None:
    value = [Note() for _ in range(1500)]
    state = ScriptState(list, lambda: [Holder("", {"value": value}, "globals")])
    state.take(is_due=True)
    assert state.pack()["lacking"] == []
    value[700].count += 1
    packed = state.pack()
    others = ScriptState(list, lambda: [Holder("", {"value": [Note() for _ in range(1500)]}, "globals")])
    assert others.apply(packed)[1] == ["value"]


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_single_change_in_a_large_tensor_counts(monkeypatch: Any, kind: str) -> None:
    monkeypatch.setattr("farandole.integrations.torchrun.in_place.script_search.SAMPLED_BYTES", 1 << 20)
    assert SAMPLED_BYTES > 1 << 20
    value: Any = torch.zeros(1 << 20) if kind == "tensor" else np.zeros(1 << 20)
    digests = Digests()
    first = digests.of("value", value, is_quick=False)
    assert digests.of("value", value, is_quick=True) == first
    value[12_345] += 1
    assert digests.of("value", value, is_quick=False) != first


def test_a_large_tensor_in_an_object_that_a_loop_body_has_made_is_named(monkeypatch: Any) -> None:
    remarks = list[str]()
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(on_remark=lambda _, text: remarks.append(text)))
    variables: dict[str, Any] = {"made": None}
    state = ScriptState(list, lambda: [Holder("", variables, "globals")])
    state.take(is_due=True)
    variables["made"] = SimpleNamespace(total=torch.zeros(50_000))
    for _ in range(3):
        state.take(is_due=False)
        state.look()
        assert remarks == []
    variables["made"].total += 1
    state.roll_back()
    assert len(remarks) == 1
    assert "made.total" in remarks[0]
