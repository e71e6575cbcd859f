"""The trial of a newcomer: what its loop body does with the samples of the others is compared with what theirs does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from farandole.training.worker.workers_trial import (
    GradientNote,
    Trial,
    Tried,
    Verdict,
    judge,
    judge_twice,
    own_values,
)


def tried(scale: float = 1.0, lr: float = 0.1, *, is_newcomer: bool = False, tied: bool = False) -> Tried:
    """Return the result on a worker whose loss is multiplied by `scale`."""
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    if tied:
        net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    trial = Trial(SimpleNamespace(modules=lambda: [net], optimizers=lambda: [optimizer]))  # type: ignore[arg-type]
    (net(torch.ones(2, 3)).square().sum() * scale).backward()
    trial.look()
    result = trial.end(is_newcomer, "")
    net(torch.ones(2, 3)).sum().backward()  # after the trial, it counts no more
    return result


def elsewhere(one: Tried, name: str = "another host") -> Tried:
    return Tried(one.is_newcomer, name, one.gradients, one.options)


def test_a_newcomer_that_does_the_same_is_admitted() -> None:
    assert judge([tried(), tried(), tried(is_newcomer=True)]) == Verdict()


@pytest.mark.parametrize(
    ("change", "what"), [({"scale": 1.0001}, "gradient of 0.bias"), ({"lr": 0.2}, "['lr'] is 0.2")]
)
def test_a_newcomer_that_does_something_else_is_refused(change: dict[str, float], what: str) -> None:
    verdict = judge([tried(), tried(**change, is_newcomer=True), tried(is_newcomer=True)])
    assert verdict.refused == (1,)
    assert what in verdict.difference


def test_where_the_others_differ_among_themselves_the_trial_shows_nothing() -> None:
    verdict = judge([tried(), tried(1.0001), tried(is_newcomer=True)])
    assert verdict.is_open
    assert not verdict.refused


def test_what_differs_twice_in_the_same_way_is_no_chance() -> None:
    first = [tried(), tried(1.1, is_newcomer=True)]
    assert judge_twice(first, [tried(), tried(1.1, is_newcomer=True)]) == judge(first)
    assert judge_twice(first, [tried(), tried(1.2, is_newcomer=True)]).refused == (1,)


def test_where_another_worker_does_something_else_the_second_time_it_may_be_chance() -> None:
    verdict = judge_twice([tried(), tried(1.1, is_newcomer=True)], [tried(1.1), tried(1.1, is_newcomer=True)])
    assert verdict.is_open
    assert not verdict.refused


def test_one_whose_script_has_begun_elsewhere_is_refused_although_it_computes_the_same() -> None:
    newcomer = tried(is_newcomer=True)
    other = Tried(True, newcomer.exact, newcomer.gradients, newcomer.options, "main().epoch is 2 instead of 1")
    verdict = judge([tried(), newcomer, other])
    assert verdict.refused == (2,)
    assert verdict.difference.startswith("main().epoch is 2 instead of 1, as from a checkpoint")


def test_one_that_has_no_gradient_is_refused() -> None:
    without = Tried(True, tried().exact, {}, tried().options)
    assert "has no gradient" in judge([tried(), without]).difference


@pytest.mark.parametrize(("scale", "is_refused"), [(1.00001, False), (1.01, True)])
def test_between_hosts_a_difference_of_rounding_is_none(scale: float, is_refused: bool) -> None:
    assert bool(judge([tried(), elsewhere(tried(scale, is_newcomer=True))]).refused) == is_refused


def test_a_gradient_of_other_signs_is_not_one_of_rounding() -> None:
    one, other = tried(), copy.deepcopy(tried(is_newcomer=True))
    note = other.gradients["0.bias"]
    other.gradients["0.bias"] = GradientNote(note.digest + 1, note.magnitude, (-note.sums[0], note.sums[1]))
    assert judge([one, elsewhere(other)]).refused == (1,)


def test_a_parameter_that_is_used_twice_has_one_gradient() -> None:
    assert tried(tied=True).gradients.keys() == {"0.weight", "0.bias", "1.bias"}


def test_workers_that_have_become_different_are_found_if_each_does_the_same_twice() -> None:
    first = [tried(), tried(1.1), tried()]
    assert "the gradient of 0.bias is another one" in own_values(first, [tried(), tried(1.1), tried()])
    assert own_values(first, [tried(), tried(1.2), tried()]) == ""
    assert own_values([tried()] * 3, [tried()] * 3) == ""


@pytest.mark.parametrize("chance", [{"draws": True}, {"samples": 7}])
def test_other_samples_or_random_numbers_of_its_own_are_no_other_worker(chance: dict[str, Any]) -> None:
    results = [tried(), msgspec.structs.replace(tried(1.1), **chance)]
    assert own_values(results, results) == ""
