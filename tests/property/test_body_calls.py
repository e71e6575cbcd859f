"""fd.mean and fd.any in a loop body, when a worker is lost: all that are left end with the same results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings, strategies as st

from farandole.errors import PeerLost
from farandole.training.worker.worker_recovery import BodyCalls
from tests.support.thread_world import ThreadTransport, ThreadWorld

CALLS = 4  # of one loop body


@dataclass
class Survivor:
    """A worker whose generation ends in its loop body: `done` calls are completed then, of those that it makes."""

    done: int
    calls: int = CALLS
    boundary_number: int = 7


def call(number: int) -> str:
    return ("mean of ()", "any")[number % 2]


def run_body(survivor: Survivor, transport: ThreadTransport, old: list[torch.Tensor]) -> list[float]:
    """The results of its calls. `old`: those that calls had before the loss."""
    is_connected = False

    def add_up(what: str, mine: torch.Tensor) -> torch.Tensor:
        if len(results) < survivor.done:
            return old[len(results)]
        raise PeerLost(what, 1, 0)

    def connect() -> None:
        nonlocal is_connected
        is_connected = True

    calls = BodyCalls(
        boundary_number=lambda: survivor.boundary_number,
        is_in_body=lambda: True,
        is_connected=lambda: is_connected,
        connect=connect,
        transport=lambda: transport,
        add_up=add_up,
    )
    results: list[float] = []
    for number in range(survivor.calls):
        results.append(float(calls.call(call(number), torch.tensor([1.0 + transport.rank], dtype=torch.float64))))
    calls.gather_at_boundaries(transport, b"")
    return results


def run(survivors: list[Survivor]) -> list[Any]:
    old = [torch.tensor([100.0 + number], dtype=torch.float64) for number in range(CALLS)]
    world = ThreadWorld(len(survivors))
    return world.run(lambda transport: run_body(survivors[transport.rank], transport, old))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 5), st.integers(0, CALLS - 1))
def test_every_call_has_the_same_result_on_all_that_are_left(data: Any, size: int, lost_in: int) -> None:
    """No worker completes a call before all are in it: so the others are in the one after it, or at their boundary."""
    done = [lost_in + data.draw(st.integers(0, 1)) for _ in range(size)]
    results = run([Survivor(each) for each in done])
    assert all(isinstance(each, list) for each in results), results
    assert all(each == results[0] for each in results)
    before = max(done)
    assert results[0][:before] == [100.0 + number for number in range(before)]
    assert results[0][before:] == [size * (size + 1) / 2] * (CALLS - before)


def test_workers_that_make_other_calls_after_an_aborted_step_do_not_wait_for_each_other() -> None:
    """`if optimizer.step(): fd.mean(loss)`: one has applied the step, the other has not and makes no call."""
    applied, aborted = run([Survivor(done=0), Survivor(done=0, calls=0)])
    assert applied == [1.0] * CALLS
    assert aborted == []


def test_calls_of_another_loop_body_are_no_answer() -> None:
    """One worker is ahead by a boundary: what it has called there is another call."""
    ahead, behind = run([Survivor(done=0, calls=2, boundary_number=8), Survivor(done=0, calls=2)])
    assert (ahead, behind) == ([1.0, 1.0], [2.0, 2.0])
