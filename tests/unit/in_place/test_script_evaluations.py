"""Evaluation loaders of a script have the length of the current world, and a length that was told before is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from farandole.integrations.torchrun.in_place import script_evaluations
from farandole.integrations.torchrun.in_place.script_evaluations import Evaluations

TABLE = TensorDataset(torch.arange(24))


class World:
    def __init__(self) -> None:
        self.size, self.generation, self.remarks = 3, 1, list[str]()

    def current(self) -> Any:
        return SimpleNamespace(
            placement=SimpleNamespace(rank=0, size=self.size), id=SimpleNamespace(number=self.generation)
        )

    def remark(self, topic: str, text: str) -> None:
        self.remarks.append(text)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    here = World()
    monkeypatch.setattr(script_evaluations, "world", here)
    return here


def loader(*, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TABLE, 2, sampler=DistributedSampler(TABLE, 3, 0, shuffle=shuffle))


def test_lengths_follow_the_world_but_for_that_of_the_training(world: World) -> None:
    training, validation, in_order = loader(shuffle=True), loader(), loader()
    evaluations, loaders = Evaluations(), [training, validation, in_order]
    evaluations.begin()
    evaluations.follow(loaders, lambda each: each is in_order)
    assert [len(each) for each in loaders] == [4, 4, 4]
    world.size = 2
    evaluations.follow(loaders, lambda each: each is in_order)
    assert [len(each) for each in loaders] == [4, 6, 4]


def test_a_length_that_was_told_with_other_workers_is_named(world: World) -> None:
    validation, evaluations = loader(), Evaluations()
    evaluations.begin()
    evaluations.note_length(validation, 4)
    evaluations.compare(validation, 4, "train.py:3")
    world.size = 2
    evaluations.compare(validation, 6, "train.py:3")
    assert len(world.remarks) == 1
    assert "has 6 batches for each, and not 4 as with 3, when the script asked for len()" in world.remarks[0]


def test_a_length_that_is_asked_for_anew_or_never_is_not(world: World) -> None:
    validation, evaluations = loader(), Evaluations()
    evaluations.begin()
    evaluations.compare(validation, 4, "train.py:3")
    evaluations.note_length(validation, 4)
    world.size = 2
    evaluations.note_length(validation, 6)
    evaluations.compare(validation, 6, "train.py:3")
    evaluations.note_length(validation, 6)
    evaluations.compare(validation, 5, "train.py:3")  # the script has changed its data set
    assert world.remarks == []


@pytest.mark.parametrize(
    ("indices", "is_named"),
    [(list(range(0, 24, 3)), True), (range(0, 24, 3), True), ([5, 1, 9], False), (range(8), False)],
)
def test_an_evaluation_that_the_script_has_divided_by_itself_is_named(
    world: World, indices: list[int] | range, is_named: bool
) -> None:
    evaluations = Evaluations()
    validation = DataLoader(Subset(TABLE, indices), 2)
    evaluations.look_at_part(validation, 0, 3, "train.py:3")
    assert world.remarks == []
    world.generation = 2
    evaluations.look_at_part(validation, 0, 3, "train.py:3")
    assert bool(world.remarks) == is_named
