"""The run loop of the step rule, alone in this process: orders of the coordinator come at chosen moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.wire.link_messages import FirstStep, Synced
from farandole.errors import CollectiveMismatch, GenerationEnded
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.worker.meetings import EPOCH_END
from farandole.training.worker.step_loop import StepLoop
from tests.support.one_worker import Orders, as_a_newcomer

pytestmark = pytest.mark.core

SAMPLES, GLOBAL_BATCH = 24, 8


@pytest.fixture
def orders() -> Iterator[Orders]:
    yield Orders()
    step.close()
    world.enter(None)


@pytest.fixture
def second_of_two() -> Iterator[Orders]:
    yield Orders(place=1, of=2)
    step.close()
    world.enter(None)


def make_state(**tracked: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES)
    loader = fd.elastic.DataLoader(data, GLOBAL_BATCH, seed=4)
    return fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, rehearse=False, **tracked)


def train(
    orders: Orders, state: Any, body: Callable[[torch.Tensor], None] = lambda x: None, epochs: int = 1, **at_end: Any
) -> None:
    """Run the loop; `body` is called in front of each step, `behind` behind the batches of each epoch."""
    behind = at_end.get("behind", lambda epoch: None)

    def function() -> None:
        for epoch in state.loader.epochs(epochs):
            for (x,) in state.loader:
                state.optimizer.zero_grad()
                body(x)
                state.model(x).square().mean().backward()
                state.optimizer.step()
            behind(epoch)

    job: Any = orders
    StepLoop(job, state).run(function)


def parameters_of_an_undisturbed_job(place: int = 0, of: int = 1, epochs: int = 1) -> torch.Tensor:
    orders, state = Orders(place, of), make_state()
    state.is_holder = True
    train(orders, state, epochs=epochs)
    return torch.cat([each.detach().flatten() for each in state.model.parameters()])


def parameters_of(state: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in state.model.parameters()])


# Faults --------------------------------------------------------------------------------------------------------------


def test_an_aborted_batch_comes_again_with_the_state_from_before_its_body(orders: Orders) -> None:
    state, bodies = make_state(counter=0), []

    def body(x: torch.Tensor) -> None:
        bodies.append((state.step, state.counter, x.tolist()))
        state.counter += 1
        if len(bodies) == 2:
            orders.lose_a_worker()

    train(orders, state, body)
    assert [(step, counter) for step, counter, _ in bodies] == [(0, 0), (1, 1), (1, 1), (2, 2)]
    assert bodies[1] == bodies[2]
    assert state.counter == 3
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job())


def test_a_step_that_is_decided_is_not_done_again(orders: Orders) -> None:
    """The order comes behind the collective, and is seen at the next boundary."""
    state, seen = make_state(counter=0), []

    def body(x: torch.Tensor) -> None:
        seen.append(state.step)
        state.counter += 1
        if state.step == 1:
            state.after_step[:] = [orders.lose_a_worker]
        else:
            state.after_step.clear()

    train(orders, state, body)
    assert (seen, state.counter, state.step) == ([0, 1, 2], 3, 3)
    assert world.current().id.number == 2
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job())


def test_an_order_that_the_links_thread_had_no_time_to_read_counts_at_the_boundary(orders: Orders) -> None:
    """A loop body that computes in Python keeps the interpreter, and the next run of it would be in vain."""
    state, seen = make_state(), []

    def body(x: torch.Tensor) -> None:
        seen.append((state.step, world.current().id.number))
        state.after_step[:] = [lambda: orders.link.unread.append(orders.lose_a_worker)] if state.step == 1 else []

    train(orders, state, body)
    assert seen == [(0, 1), (1, 1), (2, 2)]
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job())


def test_a_start_that_an_abort_has_overtaken_leads_to_the_next_one(orders: Orders) -> None:
    state, bodies = make_state(counter=0), []
    orders.overtaken = {2, 3}

    def body(x: torch.Tensor) -> None:
        bodies.append(x.tolist())
        state.counter += 1
        if len(bodies) == 2:
            orders.lose_a_worker()

    train(orders, state, body)
    assert world.current().id.number == 4
    assert (len(bodies), bodies[1] == bodies[2], state.counter) == (4, True, 3)
    assert [said.number for said in orders.link.sent if isinstance(said, Synced)] == [1, 4]


def test_what_the_code_behind_the_batches_did_is_put_back_before_it_runs_again(second_of_two: Orders) -> None:
    """Also what was written through `.data`, which autograd does not count."""
    state, called, orders = make_state(history=[]), [], second_of_two
    state.is_holder = True

    def behind(epoch: int) -> None:
        called.append(epoch)
        state.history.append(int(epoch))
        with torch.no_grad():
            next(state.model.parameters()).data.add_(100.0)
        if called == [0]:
            orders.lose_a_worker()
            fd.mean(0.0)
        with torch.no_grad():
            next(state.model.parameters()).data.sub_(100.0)

    train(orders, state, epochs=2, behind=behind)
    assert called == [0, 0, 1]
    assert state.history == [0, 1]
    assert torch.allclose(parameters_of(state), parameters_of_an_undisturbed_job(1, 2, epochs=2), atol=1e-4)


def test_the_first_step_behind_a_fault_is_reported_with_what_was_done_again(orders: Orders) -> None:
    state = make_state()

    def body(x: torch.Tensor) -> None:
        if state.step == 1 and world.current().id.number == 1:
            orders.lose_a_worker()

    train(orders, state, body)
    [first] = [said for said in orders.link.sent if isinstance(said, FirstStep)]
    assert (first.number, first.steps_redone, first.samples_redone, first.began_at) == (2, 1, GLOBAL_BATCH, 1)


def test_what_is_written_before_the_rehearsal_is_put_back_however_it_is_written(second_of_two: Orders) -> None:
    """In the first batch of a job nothing is known yet of what its loop body changes."""
    state, bodies = make_state(), []
    state.is_holder, state.has_rehearsed = True, False

    def body(x: torch.Tensor) -> None:
        bodies.append(parameters_of(state))
        state.model.weight.data.mul_(0.5)
        if len(bodies) == 1:
            second_of_two.lose_a_worker()

    train(second_of_two, state, body)
    assert torch.equal(bodies[0], bodies[1])


def test_a_call_of_the_loop_body_is_completed_by_the_remaining_workers(second_of_two: Orders) -> None:
    """The body goes on where it is, and its step is aborted and comes again."""
    state, bodies, orders = make_state(), [], second_of_two
    state.is_holder = True

    def body(x: torch.Tensor) -> None:
        bodies.append(x.tolist())
        if len(bodies) == 2:
            orders.lose_a_worker()
        assert fd.mean(float(len(bodies))) == len(bodies)

    train(orders, state, body)
    assert world.current().id.number == 2
    assert (len(bodies), bodies[1] == bodies[2]) == (4, True)
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job(1, 2))


# Planned changes -----------------------------------------------------------------------------------------------------


def test_a_planned_change_that_all_ranks_hold_happens_at_the_next_boundary(orders: Orders) -> None:
    state, generations = make_state(), []

    def body(x: torch.Tensor) -> None:
        generations.append(world.current().id.number)
        orders.link.prepared = 2 if state.step == 0 else 0

    train(orders, state, body)
    assert generations == [1, 2, 2]
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job())


WAYS = ["planned", "aborted", "decided", "left", "raised", "statistics", "epoch end"]


@pytest.mark.parametrize("way", WAYS)
def test_the_boundary_behind_a_regroup_is_counted_once_on_every_way_to_the_next_batch(
    second_of_two: Orders, way: str
) -> None:
    """Otherwise a worker would be taken for one that lacks something, and copy all of the state at the next fault."""
    state, orders, numbers, bodies = make_state(norm=torch.nn.BatchNorm1d(1)), second_of_two, [], []
    state.is_holder = True
    state.register_reset_callbacks([lambda: numbers.append(state.boundary_number)])

    def lose_in_statistics(payload: bytes) -> bytes:
        if way == "statistics" and len(bodies) == SAMPLES // GLOBAL_BATCH and not payload:
            orders.lose_a_worker()
            raise GenerationEnded("all_reduce", 1, "a worker was lost")
        return as_a_newcomer(payload)

    def function() -> None:
        orders.transport.others = lose_in_statistics
        for _ in state.loader.epochs(2):
            for (x,) in state.loader:
                bodies.append(state.step)
                if len(numbers) == 1:
                    numbers.append(state.boundary_number)
                is_first = len(bodies) == 1
                state.after_step[:] = [orders.lose_a_worker] if way == "decided" and is_first else []
                orders.link.prepared = 2 if way == "planned" and is_first else 0
                if way in ("aborted", "left", "raised") and is_first:
                    orders.lose_a_worker()
                state.optimizer.zero_grad()
                state.norm(state.model(x)).square().mean().backward()
                state.optimizer.step()
                if way == "left" and is_first:
                    break
                if way == "raised" and is_first:
                    raise GenerationEnded("a collective of the script", 1, "a worker was lost")
            if way == "epoch end" and not numbers:
                orders.lose_a_worker()

    job: Any = orders
    StepLoop(job, state).run(function)
    at_regroup, in_next_body = numbers
    assert in_next_body == at_regroup + 1
    assert state.step == 2 * SAMPLES // GLOBAL_BATCH


def test_a_newcomer_that_passes_an_epoch_without_a_batch_trains_the_next_one(orders: Orders) -> None:
    state, bodies = make_state(), []
    orders.joins = orders.starts_anew = True
    orders.link.ordered = 2

    def function() -> None:
        for epoch in state.loader.epochs(2):
            for (x,) in state.loader if epoch else ():
                bodies.append(int(epoch))
                state.optimizer.zero_grad()
                state.model(x).square().mean().backward()
                state.optimizer.step()

    job: Any = orders
    StepLoop(job, state).run(function)
    assert (bodies, state.step) == ([1, 1, 1], 3)


# The others ----------------------------------------------------------------------------------------------------------


def test_the_random_numbers_of_a_step_are_others_on_each_rank_and_the_same_when_it_is_done_again() -> None:
    drawn: dict[int, list[float]] = {}
    for place in (0, 1):
        orders, state = Orders(place, of=2), make_state()
        state.is_holder = True
        numbers = drawn.setdefault(place, [])

        def body(x: torch.Tensor, orders: Orders = orders, numbers: list[float] = numbers) -> None:
            numbers.append(torch.rand(()).item())
            if len(numbers) == 1:
                orders.lose_a_worker()

        train(orders, state, body)
        world.enter(None)
    assert all(numbers[0] == numbers[1] != numbers[2] for numbers in drawn.values())
    assert set(drawn[0]).isdisjoint(drawn[1])


def test_workers_that_end_an_epoch_at_another_step_are_told_apart(second_of_two: Orders) -> None:
    state = make_state()
    state.is_holder = True

    def behind(epoch: int) -> None:
        def one_step_less(payload: bytes) -> bytes:
            epoch, step, *others = EPOCH_END.unpack(payload)
            return EPOCH_END.pack(epoch, step - 1, *others)

        second_of_two.transport.others = one_step_less

    with pytest.raises(CollectiveMismatch, match="different epochs"):
        train(second_of_two, state, behind=behind)


def test_a_worker_that_holds_the_state_does_not_start_from_rank_0s(second_of_two: Orders) -> None:
    """It has the newest checkpoint, and rank 0 has begun anew."""
    state = make_state()
    state.step, state.is_holder = 5, True

    train(second_of_two, state)
    assert state.step == 5 + SAMPLES // GLOBAL_BATCH


def test_a_loss_in_the_middle_of_a_mend_is_a_regroup_like_any_other(second_of_two: Orders) -> None:
    """The states differ, by the headers of step 1; in the exchange that compares all of them, a worker is lost."""
    state, bodies, mends = make_state(counter=0), [], []
    state.is_holder = True

    def answer(payload: bytes) -> bytes:
        if len(bodies) == 2 and not mends and as_a_newcomer(payload) != payload:  # a Standing
            mends.append(payload)
            second_of_two.lose_a_worker()
            raise GenerationEnded("all_gather", 1, "w9 is lost")
        return as_a_newcomer(payload)

    def body(x: torch.Tensor) -> None:
        bodies.append((state.step, state.counter))
        state.counter += 1
        if state.step == 1:
            second_of_two.transport.others = answer
            state.digests.is_suspicious = True

    train(second_of_two, state, body)
    assert len(mends) == 1
    assert (bodies, state.counter) == ([(0, 0), (1, 1), (2, 2)], 3)
    assert (world.current().id.number, state.digests.is_suspicious) == (2, False)
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job(1, 2))


def test_an_error_in_a_rehearsal_says_that_it_is_one(second_of_two: Orders) -> None:
    state, bodies = make_state(), []
    state.is_holder, state.has_rehearsed = True, False

    def body(x: torch.Tensor) -> None:
        bodies.append(len(x))
        assert len(x) == bodies[0], "another size"

    with pytest.raises(AssertionError, match="another size") as raised:
        train(second_of_two, state, body)
    assert "was a rehearsal, with a part of a batch" in raised.value.__notes__[0]
