"""Optimizers whose step() has other arguments than torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), AloneTransport(1)))
    yield
    step.close()
    world.enter(None)


class Plain(torch.optim.Optimizer):
    """One of one's own; subclasses have the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def move(self, times: float = 1.0) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=times * self.param_groups[0]["lr"])


class WithoutClosure(Plain):
    def step(self) -> None:  # type: ignore[override]
        self.move()


class WithFactor(Plain):
    def step(self, factor: float) -> str:  # type: ignore[override]
        self.move(factor)
        return "its own"


class WithOption(Plain):
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.move(factor)
        return loss


class WithClosureOnly(Plain):
    def step(self, closure: Callable[[], Any] | None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.move()
        return loss


CASES: list[tuple[type[Plain], tuple[Any, ...], dict[str, Any], float]] = [
    (WithoutClosure, (), {}, 1.0),
    (WithFactor, (3.0,), {}, 3.0),
    (WithOption, (), {}, 1.0),
    (WithOption, (), {"factor": 2.0}, 2.0),
    (WithOption, (None,), {"factor": 2.0}, 2.0),
    (WithClosureOnly, (None,), {}, 1.0),
]


def hand_out() -> None:
    step.open(Batch(GlobalBatch(0, 0, 4, 0, 4, 1), 0, 4, 0))


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize(("kind", "args", "kwargs", "factor"), CASES)
def test_it_gets_what_the_script_gives(
    kind: type[Plain], args: tuple[Any, ...], kwargs: dict[str, Any], factor: float, has_loader: bool
) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = DistributedOptimizer(kind([weight]))
    if has_loader:
        hand_out()
    weight.sum().backward()
    assert optimizer.step(*args, **kwargs) is True
    assert weight.tolist() == [-0.5 * factor] * 3


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize(("kind", "kwargs", "factor"), [(WithOption, {"factor": 2.0}, 2.0), (WithClosureOnly, {}, 1.0)])
def test_a_closure_comes_with_the_other_arguments(
    kind: type[Plain], kwargs: dict[str, Any], factor: float, has_loader: bool
) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = DistributedOptimizer(kind([weight]))
    if has_loader:
        hand_out()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure, **kwargs) == 0
    assert weight.tolist() == [-0.5 * factor] * 3


@pytest.mark.parametrize("has_loader", [True, False])
def test_a_scheduler_and_a_grad_scaler_step_one_without_a_closure(has_loader: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    base = WithoutClosure([weight])
    torch.optim.lr_scheduler.ConstantLR(base, factor=0.5)
    optimizer = DistributedOptimizer(base)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if has_loader:
        hand_out()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    assert weight.tolist() == [-0.25] * 3
