"""The loop body of a newcomer runs ahead of its admission, and nothing comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.worker.step_loop import StepLoop
from farandole.training.worker.warm_up import warm_up
from tests.support.one_worker import Orders

pytestmark = pytest.mark.core

MEMBERS = 2


@pytest.fixture
def newcomer() -> Iterator[Any]:
    orders = Orders()
    orders.joins, orders.link.members = True, MEMBERS
    yield orders
    step.close()
    world.enter(None)


def make_state(**tracked: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.arange(44.0).reshape(22, 2))
    loader = fd.elastic.DataLoader(data, global_batch_size=8, shuffle=False)
    return fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, **tracked)


def train(state: Any, body: Callable[[torch.Tensor], object] = lambda x: None) -> None:
    for _ in state.loader.epochs(3):
        for (x,) in state.loader:
            body(x)
            state.optimizer.zero_grad()
            state.model(x).sum().backward()
            assert not state.optimizer.step()


def test_the_body_runs_with_each_size_that_its_share_may_have(newcomer: Any) -> None:
    """Of 8 samples in 3 and in 2 parts, and of the last 6."""
    state, sizes = make_state(), []
    warm_up(newcomer, state, lambda: train(state, lambda x: sizes.append(len(x))))
    assert sorted(sizes) == [2, 3, 4]


def test_the_worker_is_not_rank_0_meanwhile(newcomer: Any) -> None:
    state, placed = make_state(), set()
    warm_up(newcomer, state, lambda: train(state, lambda x: placed.add((fd.rank(), fd.size()))))
    assert placed == {(MEMBERS, MEMBERS + 1)}
    assert (fd.rank(), fd.size()) == (0, 1)


def test_nothing_is_left_of_it(newcomer: Any) -> None:
    state = make_state(seen=[0])
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    warm_up(newcomer, state, lambda: train(state, lambda x: state.seen.append(1)))
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert (state.step, state.loader.epoch, state.loader.cursor, state.seen) == (0, 0, 0, [0])
    assert (step.status(), state.loader.batch, state.loader.shortfall()) == ("none", None, None)


def test_an_exception_of_the_body_is_left_for_the_time_when_it_counts(newcomer: Any) -> None:
    state = make_state(seen=[0])

    def fail(x: torch.Tensor) -> None:
        state.seen.append(1)
        raise ValueError("the worker has to be a member for this")

    warm_up(newcomer, state, lambda: train(state, fail))
    assert (state.seen, state.loader.batch) == ([0], None)


def test_a_function_that_catches_every_exception_is_left(newcomer: Any) -> None:
    state, calls = make_state(), []

    def careless() -> None:
        for _ in range(5):
            try:
                calls.append(1)
                train(state)
            except Exception:  # noqa: BLE001
                pass

    warm_up(newcomer, state, careless)
    assert calls == [1]


def test_a_function_that_leaves_its_loop_early_returns(newcomer: Any) -> None:
    state, sizes = make_state(), []

    def one_batch() -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                sizes.append(len(x))
                break

    warm_up(newcomer, state, one_batch)
    assert sorted(sizes) == [2, 3, 4]
    assert state.loader.epoch == 0


def test_what_is_once_for_each_epoch_is_not_done(newcomer: Any) -> None:
    state, done = make_state(), []

    def function() -> None:
        for epoch in state.loader.epochs(1):
            epoch.once(lambda: done.append(1))
            for _ in state.loader:
                pass

    warm_up(newcomer, state, function)
    assert done == []


def test_without_rehearsals_nothing_runs_ahead(newcomer: Any) -> None:
    state, calls = make_state(), []
    state.rehearse = False
    warm_up(newcomer, state, lambda: calls.append(1))
    assert calls == []


def test_code_in_front_of_the_loop_that_fails_in_its_second_call_says_so(newcomer: Any) -> None:
    state, files = make_state(), set[str]()

    def function() -> None:
        if "log" in files:
            raise FileExistsError("log")
        files.add("log")
        train(state)

    newcomer.link.ordered, state.is_holder = 2, True  # no other worker could give it the state
    with pytest.raises(FileExistsError) as error:
        StepLoop(newcomer, state).run(function)
    assert "has called this elastic function before" in error.value.__notes__[0]


def test_an_exception_of_the_loop_body_says_nothing_of_a_second_call(newcomer: Any) -> None:
    state = make_state()

    def fail_as_a_member(x: torch.Tensor) -> None:
        if not newcomer.joins:
            raise ValueError("of the body")

    newcomer.link.ordered, state.is_holder = 2, True  # no other worker could give it the state
    with pytest.raises(ValueError, match="of the body") as error:
        StepLoop(newcomer, state).run(lambda: train(state, fail_as_a_member))
    assert not hasattr(error.value, "__notes__")
