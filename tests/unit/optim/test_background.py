"""One thread for what goes on in the background."""

from __future__ import annotations

import threading

import pytest

from farandole.training.collectives.background import Background

pytestmark = pytest.mark.core

DEADLINE_S = 10.0


def test_tasks_are_carried_out_in_order_in_another_thread() -> None:
    background, done = Background(), []
    for number in range(100):
        background.add(lambda number=number: done.append((number, threading.get_ident())))
    assert background.finish() is None
    assert [number for number, _ in done] == list(range(100))
    assert threading.get_ident() not in {thread for _, thread in done}


def test_after_one_that_raised_none_is_carried_out_and_the_error_is_told_once() -> None:
    background, done, error = Background(), [], ValueError("no")

    def fail() -> None:
        raise error

    background.add(lambda: done.append(1))
    background.add(fail)
    background.add(lambda: done.append(2))
    assert background.finish() is error
    assert background.finish() is None
    background.add(lambda: done.append(3))
    assert background.finish() is None
    assert done == [1, 3]


def test_an_error_of_one_owner_does_not_concern_another() -> None:
    one, other, may_go = Background(), Background(), threading.Event()

    def fail() -> None:
        may_go.wait(DEADLINE_S)
        raise ValueError

    done: list[int] = []
    one.add(fail)
    other.add(lambda: done.append(1))
    may_go.set()
    assert other.finish() is None
    assert isinstance(one.finish(), ValueError)
    assert done == [1]
