"""What DistributedOptimizer refuses before it touches anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.integrations.horovod.named.negotiation import Adasum, Sum
from farandole.training.optim.options import Options, check_passes, groups_of, names_of

pytestmark = pytest.mark.core


def groups(*counts: int) -> list[dict[str, Any]]:
    return [{"params": [torch.zeros(place + 1) for place in range(count)]} for count in counts]


def test_names_are_made_of_the_places_over_all_groups() -> None:
    assert list(names_of(groups(2, 1), None).values()) == ["parameter.0.0", "parameter.0.1", "parameter.1.0"]


def test_names_that_are_given_are_kept_in_the_optimizers_order_and_others_left_out() -> None:
    param_groups = groups(2)
    first, second = param_groups[0]["params"]
    names = names_of(param_groups, iter([("b", second), ("elsewhere", torch.zeros(1)), ("a", first)]))
    assert list(names.values()) == ["a", "b"]


@pytest.mark.parametrize("wrong", ["name", torch.zeros(1), ("a", torch.zeros(1), 3)])
def test_what_is_no_pair_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="tuples"):
        names_of(groups(1), [wrong])


def test_a_name_given_twice_is_refused() -> None:
    param_groups = groups(2)
    with pytest.raises(ValueError, match="more than once: weight"):
        names_of(param_groups, [("weight", parameter) for parameter in param_groups[0]["params"]])


def test_a_parameter_without_a_name_is_refused() -> None:
    param_groups = groups(2)
    with pytest.raises(ValueError, match=r"lacks 1 of .*parameter\.0\.1 of shape \(2,\)"):
        names_of(param_groups, [("weight", param_groups[0]["params"][0])])


@pytest.mark.parametrize("passes", [0, -1])
def test_a_step_needs_a_backward_pass(passes: int) -> None:
    with pytest.raises(ValueError, match=f"got {passes}"):
        check_passes(passes)


@pytest.mark.parametrize("op", [Sum, Adasum])
def test_predividing_needs_an_average(op: Any) -> None:
    with pytest.raises(ValueError, match=f"got op={op.name}"):
        Options(op=op, predivide_factor=2.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (-1, "got -1"),
        ("layers", "got str"),
        ([["weight"]], "found a str"),
    ],
)
def test_groups_that_cannot_work_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(groups=wrong)


def test_a_parameter_in_two_groups_is_refused() -> None:
    parameter = torch.zeros(3)
    with pytest.raises(ValueError, match=r"shape \(3,\) twice"):
        Options(groups=[[parameter], [parameter]])


def test_the_older_name_for_groups_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="groups=3"):
        assert groups_of(None, 3) == 3
    assert groups_of(2, 0) == 2
    assert groups_of(None, 0) is None
