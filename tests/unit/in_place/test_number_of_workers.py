"""Trials of a division are made as long as the number of workers is another one, ever more rarely."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farandole.integrations.torchrun.in_place import number_of_workers
from farandole.integrations.torchrun.in_place.number_of_workers import NumberOfWorkers


class World:
    """The world of rank 0 in a job of so many workers."""

    def __init__(self, size: int) -> None:
        self.size, self.remarks = size, list[str]()

    def current(self) -> Any:
        return SimpleNamespace(placement=SimpleNamespace(rank=0, size=self.size))

    def remark(self, topic: str, text: str) -> None:
        self.remarks.append(f"{topic}: {text}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    here = World(2)
    monkeypatch.setattr(number_of_workers, "world", here)
    return here


def number(sent: list[Any]) -> NumberOfWorkers:
    listed = SimpleNamespace(workers=3)
    loader: Any = SimpleNamespace(listed=listed, static_because="", known=-1, epoch=0, cursor=0)
    job: Any = SimpleNamespace(link=SimpleNamespace(send=sent.append))
    return NumberOfWorkers(job, loader)


def test_after_a_trial_that_finds_nothing_the_next_ones_come_ever_more_rarely(world: World) -> None:
    found, sent = number([]), list[int]()
    for step in range(5, 40):
        if found.has_to_try(step):
            sent.append(step)
            found.note_trial("", is_open=False, step=step)
    assert sent == [5, 6, 8, 12, 20, 36]
    assert world.remarks == []


def test_what_a_later_trial_finds_is_said_and_fixes_the_number(world: World) -> None:
    sent = list[Any]()
    found = number(sent)
    found.note_trial("", is_open=False, step=5)
    assert sent == []
    found.note_trial("it is a sum", is_open=False, step=6)
    assert [each.number for each in sent] == [3]
    assert "trained before step 6 may differ" in world.remarks[0]
    assert not found.has_to_try(1000)
    assert "with 2 of 3 workers" in found.why_static()


def test_what_the_first_trial_finds_was_found_in_time(world: World) -> None:
    number([]).note_trial("it is a sum", is_open=False, step=5)
    assert world.remarks == []


def test_a_trial_that_cannot_tell_is_the_last_one(world: World) -> None:
    found = number([])
    found.note_trial("", is_open=True, step=5)
    assert not found.has_to_try(10**9)


def test_with_the_workers_of_the_start_nothing_is_tried(world: World) -> None:
    world.size = 3
    assert not number([]).has_to_try(5)
