"""What a loop body changes before its step is found by a rehearsal, and put back; what cannot be is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import ConfigError
from farandole.training.state import step
from farandole.training.state.step_state import StepState
from farandole.training.worker.bodies_without_effect import Rehearsal

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    fd.init()
    yield
    step.close()
    step.on_decided(None)
    fd.shutdown()


class Counter(torch.nn.Module):
    """A module with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def make(**tracked: Any) -> StepState:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), Counter())
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(12, 3))
    state: Any = fd.elastic.TorchState(
        model=model, optimizer=optimizer, loader=fd.elastic.DataLoader(data, 4), **tracked
    )
    state.capture()
    return state


def test_all_that_a_loop_body_changes_is_put_back_and_covered_from_then_on() -> None:
    teacher = torch.nn.Linear(3, 4)
    center, losses, best = torch.zeros(4), [1.0], {"loss": [2.0]}
    state = make(teacher=teacher, center=center, losses=losses, best=best)
    before = {name: each.clone() for name, each in [*state.model.state_dict().items()] if torch.is_tensor(each)}
    weights = teacher.weight.detach().clone()
    rehearsal = Rehearsal(state)
    state.model[:2](torch.randn(4, 3))
    state.model[2].calls += 1
    teacher.weight.data.mul_(0.9)
    state.model[0].bias.data.clamp_(min=0.5)
    center.add_(1)
    losses.append(3.0)
    best["loss"].append(1.0)
    rehearsal.look()
    teacher.bias.data.add_(1)
    state.model[0].weight.data.add_(1)
    rehearsal.end()
    assert torch.equal(teacher.weight, weights)
    for name, value in before.items():
        assert torch.equal(state.model.state_dict()[name], value), name
    assert state.model[2].calls == 0
    assert (center.tolist(), losses, best) == ([0, 0, 0, 0], [1.0], {"loss": [2.0]})
    assert (state.center is center, state.losses is losses, state.best["loss"] is best["loss"]) == (True,) * 3
    before_step, behind_it = map(set, state.watched.changing)
    assert before_step == {"teacher.weight", "model.0.bias"}
    assert behind_it == {"teacher.weight", "teacher.bias", "model.0.weight"}


def test_a_worker_that_joins_copies_what_the_rehearsal_has_found() -> None:
    state, newcomer = make(teacher=torch.nn.Linear(3, 4)), make(teacher=torch.nn.Linear(3, 4))
    rehearsal = Rehearsal(state)
    state.teacher.weight.data.mul_(0.9)
    rehearsal.look()
    rehearsal.end()
    state.capture()
    newcomer.load_metadata(state.copy_of_metadata())
    assert newcomer.watched.changing[0] == ("teacher.weight",)


class Forgetful:
    """Saves less than it is."""

    def __init__(self) -> None:
        self.count, self.kept = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "kept": self.kept}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept = state["kept"]


def test_an_object_that_does_not_load_what_it_has_saved_is_refused_by_name() -> None:
    state = make(meter=Forgetful())
    rehearsal = Rehearsal(state)
    state.meter.count += 1
    with pytest.raises(ConfigError, match=r"state\.meter \(count\) changed in the loop body before"):
        rehearsal.end()


def test_a_body_that_changes_nothing_costs_no_copies() -> None:
    state = make(teacher=torch.nn.Linear(3, 4), best=float("nan"))
    rehearsal = Rehearsal(state)
    copy.deepcopy(state.teacher).weight.data.zero_()
    rehearsal.look()
    rehearsal.end()
    assert state.watched.changing[0] == ()


def test_a_step_whose_callback_raises_is_applied_once_and_counted() -> None:
    state = make()

    def fail() -> None:
        raise RuntimeError("a callback failed")

    state.after_step.append(fail)
    x = next(iter(state.loader))[0]
    state.model[:2](x).sum().backward()
    with pytest.raises(RuntimeError, match="a callback failed"):
        state.optimizer.step()
    assert (state.step, state.loader.cursor) == (1, 4)
    state.after_step.clear()
    assert len(next(iter(state.loader))[0]) == 4
    assert state.loader.global_batch.start == 4


def test_a_grad_scaler_counts_steps_and_not_micro_batches() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    model = torch.nn.Linear(3, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(8, 3))
    loader = fd.elastic.DataLoader(data, 4, max_local_batch=2)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scaler=scaler)
    norms = []

    @fd.elastic.run
    def train(state: Any) -> None:
        for _ in loader.epochs(1):
            for (x,) in loader:
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.unscale_(optimizer)
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)))
                scaler.step(optimizer)
                scaler.update()

    train(state)
    assert (state.step, scaler.get_scale()) == (2, 32.0)
    assert [norm > 0 for norm in norms] == [False, True] * 2
