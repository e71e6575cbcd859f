"""Batches that train nothing: left out by all workers, without a backward pass, or skipped by a GradScaler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.wire.link_messages import Remark
from farandole.errors import CollectiveMismatch, StepError
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.worker.meetings import LEFT_OUT
from farandole.training.worker.step_loop import StepLoop
from tests.support.one_worker import Orders, as_a_newcomer

pytestmark = pytest.mark.core

SAMPLES, GLOBAL_BATCH = 24, 8


@pytest.fixture
def orders() -> Iterator[Orders]:
    yield Orders()
    step.close()
    world.enter(None)


def make_state(scaler: Any = None, **of_loader: Any) -> Any:
    torch.manual_seed(0)
    more = {} if scaler is None else {"scaler": scaler}
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.arange(float(SAMPLES)).reshape(SAMPLES, 1))
    loader = fd.elastic.DataLoader(data, GLOBAL_BATCH, seed=4, **of_loader)
    return fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, rehearse=False, **more)


def train(orders: Orders, state: Any, body: Callable[[torch.Tensor, int], None], epochs: int = 1) -> list[str]:
    """Run the loop. Returns what the worker remarked."""

    def function() -> None:
        for _ in state.loader.epochs(epochs):
            for number, (x,) in enumerate(state.loader):
                body(x, number)

    job: Any = orders
    StepLoop(job, state).run(function)
    return [each.text for each in orders.link.sent if isinstance(each, Remark)]


def make_step(state: Any, x: torch.Tensor) -> None:
    state.optimizer.zero_grad()
    state.model(x).square().mean().backward()
    state.optimizer.step()


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_batch_that_all_workers_leave_out_changes_nothing_and_is_told_at_the_end(
    orders: Orders, bad: int, has_gradients: bool
) -> None:
    state, weights = make_state(), []

    def body(x: torch.Tensor, number: int) -> None:
        weights.append(state.model.weight.item())
        state.optimizer.zero_grad()
        if number != bad:
            make_step(state, x)
        elif has_gradients:
            (state.model(x).mean() * float("nan")).backward()

    assert train(orders, state, body) == ["1 of 3 steps trained nothing, and were skipped"]
    weights.append(state.model.weight.item())
    assert [one == other for one, other in itertools.pairwise(weights)] == [each == bad for each in range(3)]
    assert (state.step, state.loader.epoch) == (3, 1)


def test_a_worker_that_leaves_a_batch_out_alone_is_told_apart() -> None:
    orders, state = Orders(0, 2), make_state()

    def others(payload: bytes) -> bytes:
        is_trailer = len(payload) == LEFT_OUT.size
        return LEFT_OUT.pack(1, 0, 16, 24, 4, 0, 0) if is_trailer else as_a_newcomer(payload)

    orders.transport.others = others
    with pytest.raises(CollectiveMismatch, match="left out different batches"):
        train(orders, state, lambda x, number: state.optimizer.zero_grad())
    step.close()
    world.enter(None)


def test_a_batch_that_is_left_out_while_a_worker_is_lost_comes_again(orders: Orders) -> None:
    state, seen = make_state(), []

    def body(x: torch.Tensor, number: int) -> None:
        seen.append(x.flatten().tolist())
        if state.step != 1:
            make_step(state, x)
        elif world.current().id.number == 1:
            orders.lose_a_worker()

    assert train(orders, state, body) == ["1 of 3 steps trained nothing, and were skipped"]
    assert (len(seen), seen[1]) == (4, seen[2])


def test_a_loop_that_never_steps_is_an_error_in_its_first_epoch(orders: Orders) -> None:
    state = make_state()
    with pytest.raises(
        StepError, match=r"without backward\(\) and optimizer.step\(\) for samples \[16, 24\) of epoch 0"
    ):
        train(orders, state, lambda x, number: state.optimizer.zero_grad())


def test_an_optimizer_of_torchs_alone_is_an_error_at_once(orders: Orders) -> None:
    state = make_state()
    with pytest.raises(StepError, match=r"no DistributedOptimizer .* samples \[0, 8\)"):
        train(orders, state, lambda x, number: None)


def test_a_step_that_a_grad_scaler_skips_is_told(orders: Orders) -> None:
    state, weights = make_state(torch.amp.GradScaler("cpu")), []

    def body(x: torch.Tensor, number: int) -> None:
        weights.append(state.model.weight.item())
        state.optimizer.found_inf = torch.tensor(float(number == 1))
        make_step(state, x)
        del state.optimizer.found_inf

    assert train(orders, state, body) == ["1 of 3 steps trained nothing, and were skipped"]
    assert weights[0] != weights[1] == weights[2]


def test_steps_without_a_backward_pass_train_nothing(orders: Orders) -> None:
    state = make_state()
    assert train(orders, state, lambda x, number: state.optimizer.step(), epochs=10) == ["nothing was trained"]


def test_a_model_that_is_of_no_use_at_the_end_is_told(orders: Orders) -> None:
    state = make_state()

    def body(x: torch.Tensor, number: int) -> None:
        make_step(state, x * float("nan") if number == 1 else x)

    assert train(orders, state, body) == ["the parameter weight is not finite (NaN or infinite)"]


def test_a_micro_batch_without_a_backward_pass_is_told(orders: Orders) -> None:
    state = make_state(max_local_batch=4)

    def body(x: torch.Tensor, number: int) -> None:
        state.optimizer.zero_grad()
        if number != 2:
            state.model(x).square().mean().backward()
        state.optimizer.step()

    assert train(orders, state, body) == ["in 1 of 3 steps some samples had no backward pass"]


def test_an_optimizer_or_a_scaler_that_the_state_does_not_have_is_refused_in_the_first_step(orders: Orders) -> None:
    state = make_state()
    other = fd.DistributedOptimizer(torch.optim.SGD(state.model.parameters(), lr=0.01))
    without = fd.elastic.TorchState(model=state.model, loader=state.loader, rehearse=False)

    def body(x: torch.Tensor, number: int) -> None:
        other.zero_grad()
        without.model(x).mean().backward()
        other.step()

    with pytest.raises(StepError, match="belongs to no TorchState"):
        train(orders, without, body)
    state = make_state()

    def scaled(x: torch.Tensor, number: int) -> None:
        state.optimizer.found_inf = torch.tensor(0.0)
        make_step(state, x)

    with pytest.raises(StepError, match="scaler=scaler"):
        train(orders, state, scaled)


def test_a_plain_optimizer_that_steps_in_place_of_ours_is_an_error_in_the_first_step(orders: Orders) -> None:
    state = make_state()
    plain = torch.optim.SGD(state.model.parameters(), lr=0.01)

    def body(x: torch.Tensor, number: int) -> None:
        state.optimizer.zero_grad()
        state.model(x).mean().backward()
        plain.step()

    with pytest.raises(StepError, match=r"samples \[0, 8\)"):
        train(orders, state, body)
