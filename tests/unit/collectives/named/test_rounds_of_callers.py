"""Rounds that a waiting caller runs, beside those of the collectives' thread. Ranks are threads."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from farandole.errors import GenerationEnded, HorovodInternalError, PeerLost
from farandole.integrations.horovod.named.engine import NamedCollectives
from farandole.integrations.horovod.named.stages import Kind
from tests.support.named import allreduce, engine_on, run, submit
from tests.support.thread_world import ThreadTransport, ThreadWorld

pytestmark = pytest.mark.core

DEADLINE_S = 20.0
_COLLECTIVES_THREAD = "farandole-collectives"


_UNTIL_IT_SLEEPS_S = 0.1
"""The thread runs the first rounds, then sleeps; a test that is about callers waits for that."""


def awaited(named: NamedCollectives, name: str, value: float) -> float:
    return float(allreduce(named, name, torch.tensor([value]), is_awaited=True).take().item())


class WatchedTransport(ThreadTransport):
    """Notes which threads use it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.users: list[str] = []

    def all_reduce(self, *args: Any, **more: Any) -> list[bytes]:
        self.users.append(threading.current_thread().name)
        return super().all_reduce(*args, **more)


def test_a_caller_runs_the_rounds_of_its_operations_and_no_other_thread_takes_part() -> None:
    world = ThreadWorld(2)
    world.transports = [WatchedTransport(world, rank) for rank in range(2)]

    def step(transport: ThreadTransport) -> list[str]:
        named = engine_on(transport, world)
        awaited(named, "first", 1.0)  # from here on the thread leaves rounds to callers
        assert isinstance(transport, WatchedTransport)
        time.sleep(_UNTIL_IT_SLEEPS_S)
        transport.users.clear()
        for number in range(20):
            if transport.rank == number % 2:
                time.sleep(0.002)  # the other rank has begun the round long before
            assert awaited(named, f"{number}", 1.0) == 2.0
        users = list(transport.users)
        submit(named, Kind.BARRIER, "end").wait()
        named.close()
        return users

    for users in world.run(step):
        assert isinstance(users, list), users
        assert len(users) == 40  # the round, and the operation
        assert _COLLECTIVES_THREAD not in users


@pytest.mark.parametrize("seed", range(30))
def test_callers_and_the_thread_take_turns_in_any_order(seed: int) -> None:
    """Three threads on each of three ranks, each with operations that it waits for at once, later, or polls."""
    plans = [
        [random.Random(f"{seed} {thread} {number}").choice(["wait", "later", "poll"]) for number in range(12)]
        for thread in range(3)
    ]

    def reduce_all(named: NamedCollectives) -> dict[str, float]:
        results: dict[str, float] = {}
        errors: list[BaseException] = []
        pace = random.Random(f"{seed} rank {named.rank}")

        def from_thread(thread: int) -> None:
            later = []
            try:
                for number, how in enumerate(plans[thread]):
                    name, value = f"{thread}.{number}", torch.tensor([float(number)])
                    if pace.random() < 0.3:
                        time.sleep(pace.random() * 0.003)
                    handle = allreduce(named, name, value, is_awaited=how == "wait")
                    if how == "wait":
                        results[name] = handle.take().item()
                    elif how == "later":
                        later.append((name, handle))
                    else:
                        while not handle.is_done:
                            time.sleep(0.0005)
                        results[name] = handle.take().item()
                results.update((name, handle.take().item()) for name, handle in later)
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                errors.append(error)

        threads = [threading.Thread(target=from_thread, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not errors
        assert not any(thread.is_alive() for thread in threads)
        return results

    expected = {f"{thread}.{number}": 3.0 * number for thread in range(3) for number in range(12)}
    assert run(3, reduce_all) == [expected] * 3


def test_an_abort_ends_the_round_of_a_caller() -> None:
    def wait_for_nobody(named: NamedCollectives) -> None:
        if named.rank == 1:
            assert aborted.wait(DEADLINE_S)
            named.close()
            return
        awaited_by = threading.Timer(0.05, named.abort, ["worker w7 was lost"])
        awaited_by.start()
        with pytest.raises(GenerationEnded, match="worker w7 was lost"):
            awaited(named, "x", 1.0)
        named.wait_until_quiet()
        with pytest.raises(GenerationEnded, match="worker w7 was lost"):
            awaited(named, "y", 1.0)
        aborted.set()
        named.close()

    for _ in range(10):
        aborted = threading.Event()
        world = ThreadWorld(2)
        assert world.run(lambda transport, world=world: wait_for_nobody(engine_on(transport, world))) == [None] * 2


def test_an_abort_between_operations_ends_the_thread_at_once() -> None:
    def between(named: NamedCollectives) -> float:
        awaited(named, "x", 1.0)
        began = time.monotonic()
        named.abort("the membership has changed")
        named.wait_until_quiet()
        took_s = time.monotonic() - began
        named.close()
        return took_s

    worlds = [ThreadWorld(2) for _ in range(5)]
    took = [took_s for world in worlds for took_s in world.run(lambda t, world=world: between(engine_on(t, world)))]
    assert min(took) < 0.5, f"the thread has slept on: {took}"


class InterruptedTransport(ThreadTransport):
    """Is interrupted in a round, as by Ctrl-C."""

    is_due = False

    def all_reduce(self, *args: Any, **more: Any) -> list[bytes]:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return super().all_reduce(*args, **more)


def test_a_caller_that_is_interrupted_in_a_round_ends_the_operations_of_all() -> None:
    world = ThreadWorld(2)
    world.transports = [InterruptedTransport(world, rank) for rank in range(2)]

    def interrupt(transport: ThreadTransport) -> None:
        assert isinstance(transport, InterruptedTransport)
        named = engine_on(transport, world)
        awaited(named, "before", 1.0)
        time.sleep(_UNTIL_IT_SLEEPS_S)
        if transport.rank == 0:
            transport.is_due = True
            with pytest.raises(KeyboardInterrupt):
                awaited(named, "x", 1.0)
            with pytest.raises(GenerationEnded, match="interrupted by KeyboardInterrupt"):
                awaited(named, "y", 1.0)
        else:
            with pytest.raises((GenerationEnded, PeerLost)):
                awaited(named, "x", 1.0)
        named.close()

    assert world.run(interrupt) == [None, None]


def test_the_ranks_of_a_process_set_do_not_wait_for_the_callers_of_another_rank() -> None:
    computes = threading.Event()

    def in_a_set(named: NamedCollectives) -> float:
        number = submit(named, Kind.ADD_PROCESS_SET, "add", ranks=(0, 2), is_awaited=True).take()
        awaited(named, "all", 1.0)
        if named.rank == 1:
            assert computes.wait(DEADLINE_S)  # calls nothing, as in a long backward pass
            return 0.0
        began = time.monotonic()
        allreduce(named, "x", torch.ones(1), process_set=number, is_awaited=True).wait()
        took_s = time.monotonic() - began
        computes.set()
        return took_s

    assert max(run(3, in_a_set)) < 0.5


def test_a_rank_that_calls_nothing_answers_within_seconds() -> None:
    """So that the others learn which rank they wait for."""
    is_over = threading.Event()

    def wait(named: NamedCollectives) -> bool:
        awaited(named, "all", 1.0)
        if named.rank == 1:
            assert is_over.wait(DEADLINE_S)
        else:
            handle = allreduce(named, "x", torch.ones(1))
            deadline = time.monotonic() + DEADLINE_S
            while not named._negotiation.waiting() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert [each.missing for each in named._negotiation.waiting()] == [(1,)]
            is_over.set()
        value = allreduce(named, "x", torch.ones(1)).take() if named.rank == 1 else handle.take()
        return float(value.item()) == 2.0

    assert run(2, wait) == [True, True]


def test_an_error_of_a_caller_is_that_of_the_operation() -> None:
    world = ThreadWorld(2)

    def lose_one(transport: ThreadTransport) -> None:
        named = engine_on(transport, world)
        awaited(named, "x", 1.0)
        if transport.rank == 1:
            transport.abort("killed")
            named.close()
            return
        with pytest.raises(HorovodInternalError):
            awaited(named, "y", 1.0)
        named.close()

    assert world.run(lose_one) == [None, None]
