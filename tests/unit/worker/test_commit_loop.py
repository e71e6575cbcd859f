"""The run loop of the commit rule, alone in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import CollectiveMismatch, HorovodInternalError, HostsUpdatedInterrupt, PeerLost
from farandole.integrations.horovod.host_update_listeners import notification_manager
from farandole.integrations.horovod.named.engine import engine
from farandole.integrations.horovod.object_state import ObjectState, State
from farandole.integrations.horovod.run_fn import run_fn
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.state.session import SESSION, HostUpdateResult
from farandole.training.worker.run_loop import run

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


def object_state(**values: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **values)


def torch_state(**values: Any) -> TorchState:
    return TorchState(torch.nn.Linear(1, 1), **values)


@pytest.mark.parametrize("make", [object_state, torch_state])
def test_a_fault_takes_the_function_back_to_the_last_commit(make: Any) -> None:
    state, entered = make(batch=0, trail=[]), []

    @run
    def train(state: Any, factor: int, *, more: int) -> int:
        entered.append(state.batch)
        while state.batch < 5:
            state.batch += 1
            state.trail.append(state.batch)
            if state.batch % 2 == 0:
                state.commit()
            if state.batch == 3 and len(entered) == 1:
                raise HorovodInternalError("a collective failed")
        return int(state.batch * factor + more)

    assert train(state, 10, more=1) == 51
    assert entered == [0, 2]
    assert state.trail == [1, 2, 3, 4, 5]
    assert not SESSION.run_loop.receives_updates()


def test_an_interrupt_keeps_what_is_live() -> None:
    state, entered = object_state(batch=0), []

    @run
    def train(state: Any) -> None:
        entered.append(state.batch)
        if len(entered) == 1:
            state.batch = 7
            raise HostsUpdatedInterrupt

    train(state)
    assert entered == [0, 7]


def test_the_callbacks_run_before_the_state_is_synchronized_and_only_after_a_change() -> None:
    calls: list[str] = []

    class Mine(State):
        def save(self) -> None: ...
        def restore(self) -> None:
            calls.append("restore")

        def sync(self) -> None:
            calls.append("sync")

    state = Mine(lambda value: value, lambda: 0)
    state.register_reset_callbacks([lambda: calls.append("callback")])

    @run
    def train(state: Any) -> None:
        calls.append("train")
        if calls.count("train") == 1:
            raise HorovodInternalError

    train(state)
    assert calls == ["sync", "train", "restore", "callback", "sync", "train"]


@pytest.mark.parametrize("error", [CollectiveMismatch("ranks disagree"), ValueError("wrong"), KeyboardInterrupt()])
def test_what_a_new_try_would_not_help_leaves_the_function(error: BaseException) -> None:
    state = object_state(batch=0)

    @run
    def train(state: Any) -> None:
        state.batch += 1
        raise error

    with pytest.raises(type(error)):
        train(state)
    assert state.batch == 1


def test_an_optimizer_forgets_the_half_done_step() -> None:
    """The pass that failed has left a gradient; with it, the next one would count as one too many."""
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state, tries = TorchState(model, optimizer), []

    @run
    def train(state: Any) -> None:
        tries.append(1)
        model(torch.ones(1, 1)).sum().backward()
        if len(tries) == 1:
            raise HorovodInternalError
        optimizer.step()

    train(state)
    assert len(tries) == 2


def test_host_messages_reach_the_states_of_functions_that_run() -> None:
    state = object_state(batch=0)

    @run
    def train(state: Any) -> int:
        state.batch += 1
        if state.batch == 1:
            notification_manager.handle_hosts_updated(5.5, HostUpdateResult.added)
            assert state._host_messages.qsize() == 1
        state.commit()
        return int(state.batch)

    assert train(state) == 2
    notification_manager.handle_hosts_updated(6.5, HostUpdateResult.added)
    assert state._host_messages.empty()


def test_run_fn_calls_the_reset_it_is_given_and_never_skips_the_sync() -> None:
    calls: list[str] = []

    class Mine(ObjectState):
        def sync(self) -> None:
            calls.append("sync")

        def on_reset(self) -> None:
            calls.append("on_reset")

    def train(state: Any) -> str:
        calls.append("train")
        if calls.count("train") == 1:
            raise HostsUpdatedInterrupt(skip_sync=True)
        if calls.count("train") == 2:
            raise HorovodInternalError
        return "done"

    state = Mine(lambda value: value, lambda: 0, batch=1)
    assert run_fn(train, lambda: calls.append("reset"))(state) == "done"
    again = ["reset", "on_reset", "sync", "train"]
    assert calls == ["sync", "train", *again, *again]


def test_a_commit_after_an_error_that_the_script_has_caught_is_none() -> None:
    """Batches have failed since: the function begins again at the last commit."""
    state, seen = object_state(batch=0), []

    @run
    def train(state: Any) -> None:
        while state.batch < 3:
            seen.append(state.batch)
            state.batch += 1
            state.commit()

    named: Any = engine()
    original = named.raise_if_failed

    def raise_once() -> None:
        if seen == [0, 1]:
            raise PeerLost("allreduce", 1, 1)
        original()

    named.raise_if_failed = raise_once
    train(state)
    assert seen == [0, 1, 1, 2]
