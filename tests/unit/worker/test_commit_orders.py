"""The run loop of the commit rule, alone in this process: orders of the coordinator come at chosen moments."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.wire.link_messages import Elastic, Finished, FirstStep, Synced
from farandole.errors import GenerationEnded, HorovodInternalError, HostsUpdatedInterrupt, JobEnded, StepError
from farandole.integrations.horovod.commit_loop import CommitLoop
from farandole.integrations.horovod.object_state import ObjectState, State
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.state.session import SESSION, HostUpdateResult
from tests.support.one_worker import Orders

pytestmark = pytest.mark.core

BATCHES = 6


@pytest.fixture
def orders() -> Iterator[Orders]:
    yield Orders(of=2)
    step.close()
    world.enter(None)


def make_state(**tracked: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TorchState(model, optimizer, **{"batch": 0, "trail": [], **tracked})


def run(orders: Orders, state: Any, function: Callable[[], Any]) -> Any:
    job: Any = orders
    return CommitLoop(job, state).run(function)


def train(orders: Orders, state: Any, before_commit: Callable[[], None] = lambda: None, every: int = 2) -> list[int]:
    """Train all batches, with a commit after `every` of them. Return the batch of each call of the function."""
    entered = []

    def function() -> None:
        entered.append(state.batch)
        while state.batch < BATCHES:
            state.optimizer.zero_grad()
            state.model(torch.full((1, 2), float(state.batch))).sum().backward()
            state.optimizer.step()
            state.trail.append(state.batch)
            state.batch += 1
            before_commit()
            if state.batch % every == 0:
                state.commit()

    run(orders, state, function)
    return entered


def parameters_of(state: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in state.model.parameters()])


def parameters_of_an_undisturbed_job() -> torch.Tensor:
    state = make_state()
    train(Orders(of=2), state)
    return parameters_of(state)


def assert_all_is_trained_once(state: Any) -> None:
    assert state.trail == list(range(BATCHES))
    assert torch.equal(parameters_of(state), parameters_of_an_undisturbed_job())


def sent(orders: Orders, kind: type) -> list[Any]:
    return [each for each in orders.link.sent if isinstance(each, kind)]


# Faults --------------------------------------------------------------------------------------------------------------


def test_after_a_fault_the_function_begins_again_at_the_last_commit(orders: Orders) -> None:
    state = make_state()

    def lose_a_worker() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            orders.lose_a_worker()
            world.current().transport.barrier()

    assert train(orders, state, lose_a_worker) == [0, 2]
    assert world.current().id.number == 2
    assert_all_is_trained_once(state)
    assert [type(each) for each in orders.link.sent] == [Elastic, Synced, Synced, FirstStep, Finished]


def test_the_report_of_a_fault_has_the_steps_since_the_commit_and_the_number_of_the_commit(orders: Orders) -> None:
    state = make_state()

    def lose_a_worker() -> None:
        if state.batch == 5 and world.current().id.number == 1:
            orders.lose_a_worker()
            world.current().transport.barrier()

    assert train(orders, state, lose_a_worker, every=3) == [0, 3]
    (first,) = sent(orders, FirstStep)
    assert (first.number, first.steps_redone, first.began_at, first.counts) == (2, 2, 1, "commit")


def test_a_second_fault_reports_only_its_own_steps(orders: Orders) -> None:
    state = make_state()

    def lose_workers() -> None:
        if (state.batch, world.current().id.number) in ((3, 1), (6, 2)):
            orders.lose_a_worker()
            world.current().transport.barrier()

    assert train(orders, state, lose_workers) == [0, 2, 4]
    assert [(first.steps_redone, first.began_at) for first in sent(orders, FirstStep)] == [(1, 1), (2, 2)]
    assert_all_is_trained_once(state)


def test_a_start_that_an_abort_has_overtaken_leads_to_the_next_one(orders: Orders) -> None:
    state = make_state()
    orders.overtaken = {2, 3}

    def lose_a_worker() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            orders.lose_a_worker()
            world.current().transport.barrier()

    assert train(orders, state, lose_a_worker) == [0, 2]
    assert world.current().id.number == 4
    assert [said.number for said in sent(orders, Synced)] == [1, 4]
    assert_all_is_trained_once(state)


def test_an_abort_while_states_are_compared_leads_to_the_next_generation(orders: Orders) -> None:
    state, synced = make_state(), []

    def lose_another_one() -> None:
        synced.append(world.current().id.number)
        if synced == [2]:
            orders.lose_a_worker()

    state.register_reset_callbacks([lose_another_one])

    def lose_a_worker() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            orders.lose_a_worker()
            world.current().transport.barrier()

    assert train(orders, state, lose_a_worker) == [0, 2]
    assert synced == [2, 3]
    assert [said.number for said in sent(orders, Synced)] == [1, 3]
    assert_all_is_trained_once(state)


def test_after_a_fault_the_source_is_a_worker_with_a_commit_and_not_rank_0(orders: Orders) -> None:
    """This worker becomes rank 1, behind a newcomer: the fake transport refuses to receive anything."""
    state = make_state()

    def lose_a_worker() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            orders.place = 1
            orders.lose_a_worker()
            world.current().transport.barrier()

    assert train(orders, state, lose_a_worker) == [0, 2]
    assert_all_is_trained_once(state)


def test_at_the_start_of_a_job_the_source_is_rank_0() -> None:
    """Its other ranks hold nothing either, and take what they are given."""
    orders = Orders(place=1, of=2)
    with pytest.raises(AssertionError, match="rank 0 has nothing to give"):
        run(orders, make_state(), lambda: None)
    world.enter(None)


def test_a_fault_at_the_start_of_a_job_leads_to_the_next_generation(orders: Orders) -> None:
    state = make_state()
    orders.starts_anew = True
    orders.lose_a_worker()
    run(orders, state, lambda: None)
    assert [said.number for said in sent(orders, Synced)] == [2]


def test_operations_in_flight_end_before_the_last_commit_is_restored(orders: Orders) -> None:
    calls: list[str] = []

    class Watched(Orders):
        def quiesce(self) -> None:
            calls.append("quiesce")

    class Mine(State):
        def save(self) -> None: ...
        def sync(self) -> None:
            calls.append("sync")

        def restore(self) -> None:
            calls.append("restore")

    watched, state = Watched(of=2), Mine(lambda value: value, lambda: 0)
    state.register_reset_callbacks([lambda: calls.append("callback")])

    def function() -> None:
        calls.append("function")
        if calls.count("function") == 1:
            watched.lose_a_worker()
            world.current().transport.barrier()

    run(watched, state, function)
    assert calls == ["sync", "function", "quiesce", "restore", "quiesce", "callback", "sync", "function"]


def test_a_fault_that_this_worker_alone_sees_ends_the_generation_for_all(orders: Orders) -> None:
    state, transport = make_state(), orders.transport

    def fail_alone() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            raise HorovodInternalError("a named operation failed")

    assert train(orders, state, fail_alone) == [0, 2]
    (reason,) = orders.asked
    assert "HorovodInternalError: a named operation failed" in reason
    with pytest.raises(GenerationEnded, match="a named operation failed"):
        transport.barrier()
    assert_all_is_trained_once(state)


def test_a_fault_that_the_coordinator_knows_of_is_not_reported_again(orders: Orders) -> None:
    state = make_state()

    def lose_a_worker() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            orders.lose_a_worker()
            world.current().transport.barrier()

    train(orders, state, lose_a_worker)
    assert orders.asked == []


def test_a_worker_alone_begins_again_without_another_generation() -> None:
    orders, state = Orders(), make_state()

    def fail_alone() -> None:
        if state.batch == 3 and len(state.trail) == 3 and not failed:
            failed.append(1)
            raise HorovodInternalError("out of luck")

    failed: list[int] = []
    assert train(orders, state, fail_alone) == [0, 2]
    assert (orders.asked, world.current().id.number, sent(orders, FirstStep)) == ([], 1, [])
    assert state.trail == list(range(BATCHES))


def test_a_sync_of_the_users_own_that_fails_returns_to_the_commit_and_is_tried_again(orders: Orders) -> None:
    class Mine(ObjectState):
        def sync(self) -> None:
            generations.append(world.current().id.number)
            if len(generations) == 2:
                self.batch = 77
                raise HorovodInternalError("broadcast_object failed")

    generations: list[int] = []
    state, entered = Mine(lambda value: value, lambda: 0, batch=0), []

    def function() -> None:
        entered.append(state.batch)
        state.batch += 1
        if len(entered) == 1:
            state.commit()
            orders.lose_a_worker()
            world.current().transport.barrier()

    run(orders, state, function)
    assert generations == [1, 2, 3]
    assert entered == [0, 1]
    assert ["sync() raised HorovodInternalError" in reason for reason in orders.asked] == [True]


# Planned changes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [HostUpdateResult.added, HostUpdateResult.removed])
def test_a_planned_change_happens_at_the_next_commit_and_undoes_nothing(
    orders: Orders, update: HostUpdateResult
) -> None:
    state = make_state()

    def prepare() -> None:
        if state.batch == 3 and world.current().id.number == 1:
            orders.prepare(update)

    assert train(orders, state, prepare) == [0, 4]
    assert_all_is_trained_once(state)
    (first,) = sent(orders, FirstStep)
    assert (first.number, first.steps_redone) == (2, 0)
    assert orders.asked == []


def test_what_is_live_at_a_planned_change_is_kept_though_no_commit_has_it(orders: Orders) -> None:
    state, entered = make_state(), []

    def function() -> None:
        entered.append(state.batch)
        if len(entered) == 1:
            state.commit()
            state.batch = 7
            orders.prepare(HostUpdateResult.added)
            state.check_host_updates()

    run(orders, state, function)
    assert entered == [0, 7]


@pytest.mark.parametrize(("update", "is_removal"), [(HostUpdateResult.removed, True), (HostUpdateResult.mixed, False)])
def test_the_interrupt_says_whether_workers_only_leave(
    orders: Orders, update: HostUpdateResult, is_removal: bool
) -> None:
    interrupts, state = [], make_state()

    def function() -> None:
        if not interrupts:
            orders.prepare(update)
            try:
                state.commit()
            except HostsUpdatedInterrupt as interrupt:
                interrupts.append(interrupt.skip_sync)
                raise

    run(orders, state, function)
    assert interrupts == [is_removal]


def test_a_change_that_only_this_rank_knows_of_waits_for_the_others(orders: Orders) -> None:
    state = make_state()

    def function() -> None:
        orders.transport.others = lambda payload: bytes(len(payload))  # they hold no PREPARE
        orders.prepare(HostUpdateResult.added)
        state.commit()

    run(orders, state, function)
    assert world.current().id.number == 1


def test_an_interrupt_of_the_scripts_own_asks_for_a_regroup(orders: Orders) -> None:
    state, entered = make_state(), []

    def function() -> None:
        entered.append(state.batch)
        if len(entered) == 1:
            state.batch = 7
            raise HostsUpdatedInterrupt

    run(orders, state, function)
    assert entered == [0, 7]
    assert orders.asked == ["the script raised HostsUpdatedInterrupt"]


def test_a_message_for_a_generation_beyond_the_next_one_is_repeated_in_the_next_one(orders: Orders) -> None:
    """The state forgets its messages at a reset."""
    state, heard = make_state(), []

    def function() -> None:
        if world.current().id.number == 1:
            orders.prepare(HostUpdateResult.added)
            orders.lose_a_worker()
            orders.build = build  # type: ignore[method-assign]
            world.current().transport.barrier()
        heard.append(state._host_messages.qsize())

    def build(start: Any) -> Any:
        prepared = orders.link.prepared + 1
        transport = Orders.build(orders, start)
        orders.link.prepared = prepared
        orders.link.on_prepare(type("Prepared", (), {"number": prepared, "update": 2})())  # type: ignore[misc]
        return transport

    run(orders, state, function)
    assert heard == [1]


# A newcomer, and the end --------------------------------------------------------------------------------------------


def test_a_newcomer_enters_with_a_regroup_and_not_with_the_first_generation(orders: Orders) -> None:
    calls: list[str] = []

    class Mine(State):
        def sync(self) -> None:
            calls.append(f"sync {world.current().id.number}")

    state = Mine(lambda value: value, lambda: 0)
    state.register_reset_callbacks([lambda: calls.append("callback")])
    orders.joins, orders.link.ordered = True, 2
    run(orders, state, lambda: calls.append("function"))
    assert calls == ["callback", "sync 2", "function"]
    assert [said.number for said in sent(orders, Synced)] == [2]


def test_a_worker_that_is_lost_at_the_end_has_the_last_lines_repeated_from_the_commit(orders: Orders) -> None:
    state, entered = make_state(), []
    orders.link.lost_at_the_end = 1

    def function() -> str:
        entered.append(state.batch)
        if len(entered) == 1:
            state.commit()
        state.batch += 1
        return f"call {len(entered)}"

    assert run(orders, state, function) == "call 2"
    assert entered == [0, 0]
    assert [said.number for said in sent(orders, Finished)] == [1, 2]


def test_the_end_of_the_job_leaves_the_function(orders: Orders) -> None:
    state = make_state()

    def function() -> None:
        orders.link.has_ended = True
        state.commit()

    with pytest.raises(JobEnded):
        run(orders, state, function)
    assert not SESSION.is_elastic


def test_sigterm_asks_to_leave_and_once_the_job_is_over_ends_a_worker_that_is_in_no_commit(orders: Orders) -> None:
    seen: list[str] = []

    class Mine(ObjectState):
        def _keep(self) -> None:
            super()._keep()
            if orders.link.has_ended:
                os.kill(os.getpid(), signal.SIGTERM)
                seen.append("the commit goes on")

    state = Mine(lambda value: value, lambda: 0, batch=0)

    def function() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(f"asked to leave: {orders.link.was_asked_to_leave}")
        orders.link.has_ended = True
        state.save()
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append("not reached")

    with pytest.raises(SystemExit):
        run(orders, state, function)
    assert seen == ["asked to leave: True", "the commit goes on"]


def test_between_a_step_and_its_commit_there_is_nothing_to_return_to(orders: Orders) -> None:
    """With commit_follows_step the tensors are the commit until the step, and a collective before the next one is
    refused."""
    state = make_state(commit_follows_step=True)

    def function() -> None:
        state.commit()
        state.model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        fd.mean(1.0)

    with pytest.raises(StepError, match="commit"):
        run(orders, state, function)
