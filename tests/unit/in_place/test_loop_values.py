"""What the loop of an elastic function keeps outside of its TorchState: rehearsals leave no trace, and a loop body that
comes again begins as it began."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from farandole.base.wire.link_messages import Remark
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.worker.step_loop import StepLoop
from tests.support.one_worker import Orders

SAMPLES, GLOBAL_BATCH, STEPS = 48, 8, 6
of_module = 0


@pytest.fixture
def orders() -> Iterator[Orders]:
    gc.freeze()  # a worker that was forked has frozen what was there before; other tests have left much
    yield Orders()
    gc.unfreeze()
    step.close()
    world.enter(None)


@dataclass(slots=True)
class Notes:
    count: int = 0
    last: deque[int] = field(default_factory=lambda: deque(maxlen=3))


def make_state(width: int = 2) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, width)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES)
    loader = fd.elastic.DataLoader(data, GLOBAL_BATCH, seed=4)
    return fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


def counted(batches: Iterable[Any]) -> Iterator[Any]:
    return enumerate(batches)


def train(orders: Any, state: Any, lost_in: int | None, collects: int | None = None) -> dict[str, Any]:
    """Train an epoch with values of every kind, and return them. `collects`: a step in which garbage is collected."""
    global of_module
    of_module = 0
    average, model = copy.deepcopy(state.model), state.model
    notes, array, draws = Notes(), np.zeros(3), random.Random(5)
    has_lost = threading.Event()  # no value that is brought back

    def function() -> dict[str, Any]:
        global of_module
        count, mean, places, drawn, before = 0, 1.0, [], [], None
        schedule = iter(range(100))
        for _ in state.loader.epochs(1):
            for place, (x,) in counted(state.loader):  # nothing that is running names enumerate()
                if state.step == collects:
                    gc.collect()
                state.optimizer.zero_grad()
                loss = model(x).square().mean()
                if state.step == lost_in and state.has_rehearsed and not has_lost.is_set():
                    has_lost.set()
                    orders.lose_a_worker()
                loss.backward()
                state.optimizer.step()
                count, of_module, mean = count + 1, of_module + 1, 0.9 * mean + 0.1 * loss.item()
                places.append((place, next(schedule)))
                drawn.append(draws.random())
                notes.count += 1
                notes.last.append(place)
                array[place % 3] += 1
                before = x.mean(0) if before is None else 0.5 * before + x.mean(0)
                with torch.no_grad():
                    for mine, live in zip(average.parameters(), model.parameters(), strict=True):
                        mine.lerp_(live, 0.1)
        numbers = [each.tolist() for each in (*average.parameters(), *model.parameters(), before)]
        kept = {"notes": (notes.count, list(notes.last)), "array": array.tolist(), "mean": mean}
        return {"counts": (count, of_module), "places": places, "drawn": drawn, "tensors": numbers, **kept}

    return StepLoop(orders, state).run(function)


@pytest.fixture
def wanted() -> dict[str, Any]:
    return train(None, make_state(), None)


def test_rehearsals_leave_no_trace(orders: Orders, wanted: dict[str, Any]) -> None:
    assert train(orders, make_state(), None) == wanted
    assert wanted["places"] == [(each, each) for each in range(STEPS)]


@pytest.mark.parametrize("lost_in", range(1, STEPS))
def test_a_loop_body_that_comes_again_begins_as_it_began(orders: Orders, wanted: dict[str, Any], lost_in: int) -> None:
    assert train(orders, make_state(), lost_in) == wanted


@pytest.mark.parametrize("collects", [0, 1])
def test_the_count_of_the_loop_may_be_among_the_oldest_objects(
    orders: Orders, wanted: dict[str, Any], collects: int
) -> None:
    assert train(orders, make_state(), 2, collects) == wanted


@pytest.mark.parametrize("is_early", [False, True])
def test_an_iterator_may_be_made_before_the_epoch(orders: Orders, is_early: bool) -> None:
    state = make_state()
    early = enumerate(state.loader) if is_early else None
    gc.collect()
    epochs = state.loader.epochs(1)

    def function() -> list[int]:
        places = list[int]()
        for _ in epochs:
            for place, (x,) in early or counted(state.loader):
                state.optimizer.zero_grad()
                state.model(x).square().mean().backward()
                state.optimizer.step()
                places.append(place)
        return places

    assert StepLoop(orders, state).run(function) == list(range(STEPS))


def test_large_tensors_that_stay_changed_are_named(orders: Orders) -> None:
    train(orders, make_state(width=20_000), 3)
    texts = [each.text for each in orders.link.sent if isinstance(each, Remark)]
    assert [each for each in texts if "the loop body changes average" in each] == texts[:1] != []


def train_around(orders: Any, lost_in: int | None, values: Any, change: Callable[[Any, int], None]) -> Any:
    """Train an epoch whose loop body calls change(values, step), and return the values."""
    state, has_lost = make_state(), threading.Event()

    def function() -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                state.optimizer.zero_grad()
                change(values, state.step)
                if state.step == lost_in and state.has_rehearsed and not has_lost.is_set():
                    has_lost.set()
                    orders.lose_a_worker()
                state.model(x).square().mean().backward()
                state.optimizer.step()

    StepLoop(orders, state).run(function)
    return values


@pytest.mark.parametrize("grows", [0, 1, 3])
@pytest.mark.parametrize("kind", [list, deque, lambda items: deque(items, maxlen=5)])
@pytest.mark.parametrize("at_first", [0, 2000])
def test_items_that_a_body_adds_are_there_once(orders: Orders, kind: Any, at_first: int, grows: int) -> None:
    def add(items: Any, step: int) -> None:
        items.extend([step] * grows)

    wanted = kind(range(at_first))
    for number in range(STEPS):
        add(wanted, number)
    for lost_in, link in ((None, None), (3, orders)):
        assert train_around(link, lost_in, kind(range(at_first)), add) == wanted
    assert not any(isinstance(each, Remark) for each in orders.link.sent)


def change_in_the_middle(values: Any, _: int) -> None:
    if isinstance(values, list):
        values.append(values.pop(0))
    elif isinstance(values, dict):
        values[5] += 1
    else:
        values.add(len(values) + 1_000_000)


def container(kind: Any, size: int) -> Any:
    return dict.fromkeys(range(size), 0) if kind is dict else kind(range(size))


@pytest.mark.parametrize("size", [20, 2000, 30_000])
@pytest.mark.parametrize("kind", [list, dict, set])
def test_containers_that_change_otherwise_are_brought_back_or_named(orders: Orders, kind: Any, size: int) -> None:
    changed = container(kind, size)
    for number in range(STEPS):
        change_in_the_middle(changed, number)
    assert train_around(None, None, container(kind, size), change_in_the_middle) == changed
    is_equal = train_around(orders, 3, container(kind, size), change_in_the_middle) == changed
    is_named = any(isinstance(each, Remark) and "changes values" in each.text for each in orders.link.sent)
    assert (is_equal, is_named) == (size <= 20_000, size > 20_000)
