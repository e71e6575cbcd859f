"""What a framework is fed with: a batch for each decided step, whatever it takes to make one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.membership import Shortfall
from farandole.integrations.frameworks.feed import Feed
from farandole.training.state import step

SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS, STEPS = 10, 4, 2, 6
DATA = torch.utils.data.TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1))


@pytest.fixture(autouse=True)
def _initialized() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


class Framework:
    """A trainer that owns its loop, counts by itself, and knows nothing of faults."""

    def __init__(self, **settings: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = fd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.loader = fd.elastic.DataLoader(DATA, GLOBAL_BATCH_SIZE, seed=1, **settings)
        self.feed = Feed(self.loader)
        self.state: Any = fd.elastic.TorchState(model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.entered: list[tuple[int, int, int]] = []
        self.computed: list[list[int]] = []  # of each forward pass, its samples
        self.applied: list[list[int]] = []  # of each step as this framework counts them
        self.before_backward: Callable[[], None] = lambda: None
        self.has_backward = True

    def fit(self) -> None:
        self.feed.train(self.state, EPOCHS, STEPS, self.enter, lambda: False)

    def enter(self, is_left: bool) -> None:
        self.entered.append(self.feed.place)
        for _ in range(self.loader.epoch, EPOCHS if is_left else 0):
            for batch in self.feed:
                self.feed.until_reduced(batch, self.compute)
                assert self.optimizer.step()
                self.applied.append(self.computed[-1])

    def compute(self, batch: Any) -> None:
        self.computed.append([int(number) for number in batch[0].flatten()])
        self.before_backward()
        if self.has_backward:
            self.model(batch[0]).mean().backward()


def flat(batches: list[list[int]]) -> list[int]:
    return sorted(sample for batch in batches for sample in batch)


def test_all_samples_of_all_epochs_come_once() -> None:
    framework = Framework()
    framework.fit()
    assert [len(batch) for batch in framework.applied] == [4, 4, 2] * EPOCHS
    assert flat(framework.applied) == sorted([*range(SAMPLES)] * EPOCHS)
    assert framework.entered == [(0, 0, 0)]
    assert framework.state.step == 6
    assert framework.loader.epoch == EPOCHS
    assert framework.loader.shortfall() is None


def test_whether_a_framework_asks_for_more_than_an_epoch_has_makes_no_difference_to_its_boundaries() -> None:
    """One that entered in the middle of an epoch does, and another one counts; they have to meet at the same ones."""

    def boundaries(takes: Callable[[Feed], Iterator[Any]]) -> int:
        framework, count = Framework(), 0

        class Counts:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self.inner, name)

            def reach_boundary(self) -> None:
                nonlocal count
                count += 1
                self.inner.reach_boundary()

        def enter(is_left: bool) -> None:
            framework.loader.hooks = Counts(framework.loader.hooks)
            for _ in range(EPOCHS):
                for batch in takes(framework.feed):
                    framework.feed.until_reduced(batch, framework.compute)
                    framework.optimizer.step()

        framework.feed.train(framework.state, EPOCHS, STEPS, enter, lambda: False)
        return count

    assert boundaries(iter) == boundaries(lambda feed: islice(iter(feed), len(feed)))


def test_the_micro_batches_of_a_step_are_one_batch_for_the_framework() -> None:
    framework = Framework(micro_batch_size=2)
    framework.fit()
    assert len(framework.applied) == 6
    assert [len(batch) for batch in framework.computed] == [2] * 10
    assert flat(framework.computed) == sorted([*range(SAMPLES)] * EPOCHS)


def test_a_step_that_was_aborted_is_done_again_inside_of_the_frameworks_step() -> None:
    framework = Framework()
    framework.before_backward = lambda: step.abort() if len(framework.computed) == 2 else None
    framework.fit()
    assert framework.computed[1] == framework.computed[2]
    assert len(framework.computed) == 7
    assert flat(framework.applied) == sorted([*range(SAMPLES)] * EPOCHS)
    assert framework.entered == [(0, 0, 0)]


@pytest.mark.parametrize(("decided", "place"), [(1, (0, 2, 2)), (2, (1, 0, 3))])
def test_who_copies_a_step_from_others_enters_the_frameworks_loop_anew_behind_it(
    decided: int, place: tuple[int, int, int]
) -> None:
    """In the middle of an epoch, and at its end, where no batch is left to go on with."""
    framework = Framework()
    loader, state = framework.loader, framework.state

    class SomebodyWasAhead:
        """As a regroup: the step that was in flight here was applied by the source rank."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def reach_boundary(self) -> None:
            if step.is_aborted() and not step.is_rehearsal():
                loader.commit(loader.global_batch)
                state.step += 1
                step.close()
                loader.set_world(0, 1)
            self.inner.reach_boundary()

    def abort_once() -> None:
        if len(framework.computed) == decided + 1:
            loader.hooks = SomebodyWasAhead(loader.hooks)
            step.abort()

    framework.before_backward = abort_once
    framework.fit()
    assert framework.entered == [(0, 0, 0), place]
    assert len(framework.applied) == 5
    assert flat(framework.computed) == sorted([*range(SAMPLES)] * EPOCHS)
    assert state.step == 6


def test_a_step_in_which_no_parameter_has_a_gradient_is_a_step() -> None:
    framework = Framework()
    framework.has_backward = False
    framework.fit()
    assert len(framework.applied) == framework.state.step == 6


def test_a_framework_that_leaves_an_epoch_early_has_left_it_for_good() -> None:
    framework, epochs = Framework(), []

    def two_batches_each(is_left: bool) -> None:
        for _ in range(EPOCHS):
            for number, batch in enumerate(framework.feed):
                epochs.append(framework.loader.epoch)
                framework.feed.until_reduced(batch, framework.compute)
                framework.optimizer.step()
                if number == 1:
                    break

    framework.feed.train(framework.state, EPOCHS, STEPS, two_batches_each, lambda: False)
    assert epochs == [0, 0, 1, 1]
    assert framework.loader.shortfall() == Shortfall(0, 0, STEPS, 2)


def test_a_framework_that_has_stopped_is_told_that_nothing_is_left() -> None:
    framework, told = Framework(), []
    framework.feed.train(framework.state, EPOCHS, STEPS, told.append, lambda: True)
    assert told == [False]
    assert framework.loader.shortfall() is None  # it wanted so
