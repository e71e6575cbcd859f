"""Copies that go on in the background are complete before anything changes what they copy."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import StepError
from farandole.training.collectives import world
from farandole.training.state.deep_copy import BackgroundCopy, finish_all, finish_before_loading
from farandole.training.state.session import SESSION

pytestmark = pytest.mark.core

LARGE = 300_000  # elements: more than is copied at once
_HOLD_S = 0.3  # how long a copy waits for a change that must not come


class HeldTarget(torch.Tensor):
    """A tensor whose copy waits until `changed`, or until it is clear that nobody changes anything before it."""

    changed: threading.Event

    def copy_(self, source: torch.Tensor, *_: Any, **__: Any) -> HeldTarget:  # type: ignore[override]
        self.changed.wait(_HOLD_S)
        torch.Tensor.copy_(self.as_subclass(torch.Tensor), source)
        return self


def held_copy(source: torch.Tensor) -> tuple[BackgroundCopy, HeldTarget]:
    target = torch.zeros_like(source).as_subclass(HeldTarget)
    target.changed = threading.Event()
    background = BackgroundCopy()
    background.begin([(source.detach(), target)])
    return background, target


def check_untorn(source: torch.Tensor, change: Callable[[], object]) -> None:
    """`change` changes the source, and the copy holds what was there before."""
    before = source.detach().clone()
    background, target = held_copy(source)
    change()
    target.changed.set()
    background.finish()
    assert torch.equal(target.as_subclass(torch.Tensor), before)
    assert not torch.equal(source.detach(), before)


def weights() -> torch.nn.Parameter:
    weights = torch.nn.Parameter(torch.rand(LARGE))
    weights.grad = torch.ones(LARGE)
    return weights


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_steps_after_the_copy(kind: type[torch.optim.Optimizer]) -> None:
    mine = weights()
    optimizer = kind([mine], lr=0.1)  # type: ignore[call-arg]
    check_untorn(mine, optimizer.step)


def test_a_state_dict_is_loaded_after_the_copy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600))
    other = {key: value + 1 for key, value in model.state_dict().items()}
    finish_before_loading(model)
    check_untorn(model[0].weight, lambda: model.load_state_dict(other))


def test_a_part_of_a_model_is_loaded_after_the_copy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600))
    other = {key: value + 1 for key, value in model[0].state_dict().items()}
    finish_before_loading(model)
    check_untorn(model[0].weight, lambda: model[0].load_state_dict(other))


def test_the_next_copy_waits_for_the_last_one() -> None:
    source = torch.rand(LARGE)
    background, target = held_copy(source)
    before = source.clone()
    background.begin([])
    assert torch.equal(target.as_subclass(torch.Tensor), before)


def test_small_things_are_copied_at_once() -> None:
    source, target = torch.ones(10), torch.zeros(10)
    BackgroundCopy().begin([(source, target)])
    assert target.tolist() == [1] * 10


def test_what_a_copy_raised_is_raised_where_somebody_can_act() -> None:
    background = BackgroundCopy()
    background.begin([(torch.rand(LARGE), torch.rand(3))])
    with pytest.raises(RuntimeError):
        background.finish()
    background.finish()  # once


def test_many_large_tensors_are_all_copied() -> None:
    sources = [torch.rand(LARGE) for _ in range(20)]
    targets = [torch.zeros(LARGE) for _ in range(20)]
    background = BackgroundCopy()
    background.begin(list(zip(sources, targets, strict=True)))
    finish_all()
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    background.finish()


@pytest.fixture
def elastic() -> Iterator[None]:
    """As inside of an elastic function."""
    SESSION.open(object())  # type: ignore[arg-type]
    yield
    SESSION.close()
    world.refuse_collectives(None)


def postponed(source: torch.Tensor) -> tuple[BackgroundCopy, torch.Tensor]:
    copies, target = BackgroundCopy(), torch.zeros_like(source)
    copies.postpone([(source.detach(), target)])
    return copies, target


@pytest.mark.usefixtures("elastic")
def test_what_is_postponed_is_copied_when_somebody_asks_for_it() -> None:
    mine = weights()
    copies, target = postponed(mine)
    assert target.eq(0).all()
    copies.finish_to_restore()
    assert torch.equal(target, mine)
    torch.optim.SGD([mine], lr=0.1).step()
    copies.finish_to_restore()  # the copy is there, so a step takes nothing away
    assert not world.are_refused()


@pytest.mark.usefixtures("elastic")
def test_what_is_postponed_is_copied_before_a_state_dict_is_loaded() -> None:
    model = torch.nn.Linear(3, 3)
    before = model.weight.detach().clone()
    finish_before_loading(model)
    copies, target = postponed(model.weight)
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    copies.finish_to_restore()
    assert torch.equal(target, before)


@pytest.mark.usefixtures("elastic")
def test_after_a_step_there_is_no_way_back_until_the_next_commit() -> None:
    mine = weights()
    optimizer = torch.optim.SGD([mine], lr=0.1)
    copies, target = postponed(mine)
    optimizer.step()
    optimizer.step()
    finish_all()
    assert target.eq(0).all()  # not a copy of what the step has left
    with pytest.raises(StepError, match="a return to the last commit is not possible between"):
        copies.finish_to_restore()
    with pytest.raises(StepError, match=r"mean of \(\) between optimizer.step\(\) and state.commit\(\)"):
        fd.mean(1.0)
    copies.postpone([(mine.detach(), target)])
    world.raise_if_refused("allreduce")
    copies.finish_to_restore()
    assert torch.equal(target, mine)


def test_outside_of_an_elastic_function_a_step_waits_for_what_is_postponed() -> None:
    mine = weights()
    before = mine.detach().clone()
    copies, target = postponed(mine)
    torch.optim.SGD([mine], lr=0.1).step()
    copies.finish_to_restore()
    assert torch.equal(target, before)


def test_hooked_modules_can_be_copied_and_pickled() -> None:
    model = torch.nn.Linear(2, 2)
    finish_before_loading(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.weight, model.weight)


def test_a_process_may_end_while_a_copy_is_under_way() -> None:
    code = """
import torch
from farandole.training.state.deep_copy import BackgroundCopy
BackgroundCopy().begin([(torch.ones(20_000_000), torch.empty(20_000_000)) for _ in range(4)])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
