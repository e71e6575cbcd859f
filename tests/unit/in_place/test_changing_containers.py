"""Containers of the script that change while they are looked at: by its other threads, or by its profiler."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.integrations.torchrun.in_place.script_holder import Holder
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.training.collectives import world


class Event:
    """What a thread reports, with what makes the garbage collector run Python code in the middle of anything."""

    def __init__(self, number: int) -> None:
        self.number, self.itself = number, self

    def __del__(self) -> None:
        self.number += 1


def add_to_dictionary(values: SimpleNamespace, number: int) -> None:
    values.by_number[number % 400] = (number, [number])
    values.by_number.pop(number * 7 % 400, None)
    values.ordered[number % 200] = Event(number)
    values.ordered.pop(number * 3 % 200, None)


def add_to_sequences(values: SimpleNamespace, number: int) -> None:
    values.last.append(Event(number))
    values.seen.append((number, (number, [number])))
    if len(values.seen) > 300:
        del values.seen[:150]


def add_to_set(values: SimpleNamespace, number: int) -> None:
    values.names.add((number, "a"))
    if len(values.names) > 300:
        values.names.pop()


def add_attributes(values: SimpleNamespace, number: int) -> None:
    setattr(values, f"at_{number % 50}", Event(number))
    vars(values).pop(f"at_{number * 3 % 50}", None)


@pytest.fixture(autouse=True)
def many_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other threads come at any place, and remarks go nowhere."""
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(on_remark=lambda *_: None))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("change", [add_to_dictionary, add_to_sequences, add_to_set, add_attributes])
def test_other_threads_may_change_them_at_any_time(change: Callable[[SimpleNamespace, int], None]) -> None:
    values = SimpleNamespace(by_number={}, ordered=OrderedDict(), last=deque(maxlen=300), seen=[], names=set(), own=0)
    state = ScriptState(list, lambda: [Holder("values", values, "object")])
    stop = threading.Event()

    def change_on() -> None:
        for number in iter(int, 1):
            change(values, number + int(time.monotonic_ns()) % 1000)
            if stop.is_set():
                return

    thread = threading.Thread(target=change_on)
    thread.start()
    try:
        for body in range(30):
            state.take(is_due=body % 2 == 0)
            values.own += 1
            state.roll_back()
            state.pack()
            assert values.own == 0
    finally:
        stop.set()
        thread.join()


class Vanishing(dict[str, Any]):
    """Another thread removes what is to be removed just before."""

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        raise KeyError(key)


def test_what_another_thread_has_removed_meanwhile_is_gone() -> None:
    values = Vanishing(kept=1)
    holder = Holder("values", values, "dict")
    then = holder.keep()
    values["new"] = 2
    holder.restore(then)
    assert values == {"kept": 1}


def test_a_list_to_which_a_profiler_adds_each_call_comes_to_an_end() -> None:
    calls: list[tuple[int, tuple[str, list[int]]]] = [(number, ("a", [number])) for number in range(50)]
    state = ScriptState(list, lambda: [Holder("values", SimpleNamespace(calls=calls), "object")])

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            assert len(calls) < 20_000
            calls.append((time.monotonic_ns(), (frame.f_code.co_name, [1])))

    sys.setprofile(note)
    try:
        for _ in range(4):
            state.take(is_due=True)
            state.roll_back()
    finally:
        sys.setprofile(None)
    assert len(calls) > 50
