"""What is hashed of a state: everything within a turn, but for what each rank computes from its own local batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farandole.training.state.state_digest import TURN
from farandole.training.state.state_kinds import named_tensors
from farandole.training.state.step_state import StepState
from tests.unit.state.test_sync import trained_state

pytestmark = pytest.mark.core

BN = ("running_mean", "running_var", "num_batches_tracked")


class Average:
    """An object with tensors that only its state_dict() shows."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [each.view_as(each) for each in self.shadow], "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.shadow, state["shadow"], strict=True):
            mine.copy_(saved)


def state_of_all_kinds() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 60, 3), torch.nn.BatchNorm2d(60), torch.nn.Flatten())
    model.append(torch.nn.Linear(60 * 4 * 4, 200))
    model.to(memory_format=torch.channels_last)
    model.register_buffer("queue", torch.randn(100, 70))
    loose = torch.nn.Parameter(torch.randn(7))
    optimizer = torch.optim.AdamW([*model.parameters(), loose])
    (model(torch.randn(2, 3, 6, 6)).square().mean() + loose.sum()).backward()
    optimizer.step()
    state: Any = StepState(
        model=model,
        optimizer=optimizer,
        loader=trained_state(0, 0).loader,
        ema=copy.deepcopy(model),
        average=Average(model),
        kept={"rows": [torch.randn(30), 3]},
    )
    return state


def turn(state: Any) -> list[int]:
    return [state.digests.of_due_block(step) for step in range(TURN, 2 * TURN)]


def names(state: Any) -> dict[str, torch.Tensor]:
    found = {each.name: each.find() for each in named_tensors(state._sort(), state.__dict__)}
    assert all(tensor is not None for tensor in found.values())
    return found  # type: ignore[return-value]


def test_every_tensor_has_a_name_but_the_statistics_of_batchnorm() -> None:
    found = names(state_of_all_kinds())
    for name in ("model.0.weight", "model.queue", "optimizer.0.exp_avg", "optimizer.6", "optimizer.6.step"):
        assert name in found
    for name in ("ema.1.bias", "ema.queue", "average.shadow.3", "kept.rows.0"):
        assert name in found
    assert not [name for name in found if name.endswith(BN)]
    assert len({id(tensor) for tensor in found.values()}) == len(found)


@pytest.mark.parametrize("name", sorted(names(state_of_all_kinds())))
def test_a_changed_element_of_any_tensor_is_found_within_one_turn(name: str) -> None:
    state = state_of_all_kinds()
    before = turn(state)
    assert turn(state) == before
    tensor = names(state)[name]
    with torch.no_grad():
        place = tuple((torch.tensor(tensor.shape) * 2 // 3).tolist())
        tensor[place] += 1e-3
    assert turn(state) != before


def changed_by(change: Callable[[Any], object]) -> bool:
    state = state_of_all_kinds()
    before = turn(state)
    with torch.no_grad():
        change(state)
    return turn(state) != before


def test_statistics_of_batchnorm_may_differ() -> None:
    assert not changed_by(lambda state: state.model[1].running_mean.add_(1))
    assert not changed_by(lambda state: state.ema[1].running_var.add_(1))


def test_tensors_that_were_exchanged_are_found_again() -> None:
    def load(state: Any) -> None:
        saved = copy.deepcopy(state.optimizer.state_dict())
        saved["state"][0]["exp_avg"][0, 0, 0, 0] += 1
        state.optimizer.load_state_dict(saved)

    def replace(state: Any) -> None:
        state.model[3].weight = torch.nn.Parameter(state.model[3].weight + 1)

    assert changed_by(load)
    assert changed_by(replace)
    assert changed_by(lambda state: setattr(state.model, "queue", torch.zeros(3)))
    assert changed_by(lambda state: state.optimizer.state.clear())


def test_a_tensor_that_differs_again_a_step_later_is_hashed_no_more() -> None:
    state = state_of_all_kinds()
    digests = state.digests
    digests.resolved(301, {"model.queue": 0}, [])
    assert digests.of_due_block(301) == 0, "no step has changed it since"
    before = digests.of_due_block(302)
    state.model.queue[0, 0] += 1
    assert before != digests.of_due_block(302) != 0
    digests.resolved(303, {}, ["model.queue"])
    before = turn(state)
    state.model.queue[0, 0] += 1
    assert turn(state) == before


def test_samples_see_the_beginning_of_all_tensors() -> None:
    state = state_of_all_kinds()
    for name, tensor in names(state).items():
        is_trained = not name.startswith(("model.queue", "ema.queue", "average", "kept"))
        before = [digest_of_sample(state, trained_only) for trained_only in (True, False)]
        with torch.no_grad():
            tensor[(0,) * tensor.dim()] += 1
        after = [digest_of_sample(state, trained_only) for trained_only in (True, False)]
        assert [one != other for one, other in zip(before, after, strict=True)] == [is_trained, True]


def digest_of_sample(state: Any, trained_only: bool) -> int:
    return int(state.digests.of_sample(7, trained_only))
