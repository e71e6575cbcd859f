"""The objects of a script, as they are noted and chosen for its training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.errors import ConfigError
from farandole.integrations.torchrun.in_place.script_objects import Noted, Registry, kept_count, line_of_script


def test_an_object_is_noted_as_long_as_it_exists_with_the_line_that_constructed_it() -> None:
    noted: Noted[Any] = Noted()
    kept, dropped = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    noted.add(kept)
    noted.add(dropped)
    del dropped
    assert list(noted) == [kept]
    assert noted.line_of(kept).startswith("test_script_objects.py:")
    assert noted.line_of(object()) == ""


def test_the_first_obstacle_is_the_reason() -> None:
    registry = Registry()
    registry.note_obstacle("a group of ranks [0]")
    registry.note_obstacle("a group of ranks [1]")
    with pytest.raises(ConfigError, match=r"a group of ranks \[0\] \(test_script_objects.py:\d+\)"):
        registry.objects()


def test_without_a_parallel_module_nothing_is_reduced() -> None:
    with pytest.raises(ConfigError, match="there is no DistributedDataParallel"):
        Registry().objects()


def test_the_line_of_the_script_is_that_of_its_innermost_frame() -> None:
    assert line_of_script().startswith("test_script_objects.py:")


def mean_over(total: float, nprocs: int, found: list[str]) -> float:
    found.append(kept_count(3))
    return total / nprocs


class Options:
    def __init__(self, world_size: int) -> None:
        self.world_size, self.batch_size = world_size, 3


def test_a_number_of_workers_that_a_script_keeps_is_found_where_it_is_used() -> None:
    found: list[str] = []
    mean_over(1.0, 3, found)
    mean_over(1.0, 2, found)
    args = Options(3)
    found.append(f"{kept_count(3)} {args.world_size}")
    args = Options(2)
    found.append(kept_count(3))
    assert found == ["nprocs", "", "args.world_size 3", ""]
