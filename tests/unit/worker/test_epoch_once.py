"""epoch.once() in an elastic function, and the end of an epoch that was left early."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import GenerationEnded
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.state.packing import unpack

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


def make(size: int = 12) -> Any:
    model = torch.nn.Linear(3, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    data = torch.utils.data.TensorDataset(torch.randn(size, 3))
    loader = fd.elastic.DataLoader(data, 4, seed=4)
    return fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, history=[])


def train_epoch(state: Any) -> None:
    for (x,) in state.loader:
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        state.optimizer.step()


def test_an_epoch_is_a_number_and_runs_a_function_once() -> None:
    state = make()

    @fd.elastic.run
    def train(state: Any) -> None:
        for epoch in state.loader.epochs(3):
            assert epoch.once(partial(state.history.append, ("begin", epoch)))
            train_epoch(state)
            assert epoch.once(partial(state.history.append, ("end", epoch)))

    train(state)
    assert state.history == [(word, epoch) for epoch in range(3) for word in ("begin", "end")]


def test_what_was_done_once_is_not_done_again_when_the_function_is_entered_again() -> None:
    """As a newcomer enters it, or a survivor after a fault in a collective of its own in the tail."""
    state, ran = make(), []

    @fd.elastic.run
    def train(state: Any) -> None:
        for epoch in state.loader.epochs(2):
            train_epoch(state)
            ran.append(epoch.once(partial(state.history.append, epoch)))
            ran.append(epoch.once(partial(state.history.append, -epoch)))
            if epoch == 1 and len(ran) == 4:
                raise GenerationEnded("mean", 1, "a worker was lost")

    with pytest.raises(GenerationEnded):
        train(state)
    state.capture()
    taken_over = make()
    taken_over.load_metadata(unpack(state.captured()))
    train(taken_over)
    assert ran == [True] * 4 + [False] * 2
    assert taken_over.history == [0, 0, 1, -1]


@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("saves_inside", [True, False])
def test_a_job_that_goes_on_from_a_state_of_its_own_does_nothing_twice(is_elastic: bool, saves_inside: bool) -> None:
    """The script saves behind the loop over the batches, in once() or after it, and is started anew from there."""
    saved: dict[str, Any] = {}
    ends = [1]
    done: list[tuple[str, int]] = []

    def save(state: Any) -> None:
        saved["model"], saved["optimizer"] = state.model.state_dict(), state.optimizer.state_dict()
        saved["loader"] = state.loader.state_dict()

    def train(state: Any) -> None:
        for epoch in state.loader.epochs(3):
            train_epoch(state)
            epoch.once(partial(done.append, ("evaluated", epoch)))
            if saves_inside:
                epoch.once(partial(save, state))
            elif epoch == 1:
                save(state)
            epoch.once(partial(done.append, ("told", epoch)))
            if epoch in ends:
                return  # the machine is switched off

    run = fd.elastic.run(train) if is_elastic else train
    run(make())
    ends.clear()
    resumed = make()
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.loader.load_state_dict(saved["loader"])
    done.pop()  # what came behind the saving is not in what was saved
    run(resumed)
    assert done == [(word, epoch) for epoch in range(3) for word in ("evaluated", "told")]
    assert resumed.loader.epoch == 3


def test_what_raises_in_once_is_not_done() -> None:
    state = make()
    epoch = next(state.loader.epochs(1))
    with pytest.raises(ZeroDivisionError):
        epoch.once(lambda: 1 // 0)
    assert "once" not in state.loader.state_dict()


def test_an_epoch_that_break_has_ended_does_not_go_on_when_its_end_is_handed_out_again() -> None:
    state = make()
    epochs = state.loader.epochs(2)
    next(epochs)
    for (x,) in state.loader:
        state.model(x).square().mean().backward()
        state.optimizer.step()
        break

    class Interrupted(LoaderHooks):
        def reach_epoch_end(self) -> bool:
            return False

    state.loader.hooks, kept = Interrupted(), state.loader.hooks
    assert next(epochs) == 0
    assert list(state.loader) == []
    state.loader.hooks = kept
    assert next(epochs) == 1
    assert len(list(zip(range(1), state.loader, strict=False))) == 1
