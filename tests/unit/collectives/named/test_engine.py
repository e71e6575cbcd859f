"""The thread that runs rounds: who is matched with whom, and how everything ends. Ranks are threads."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farandole.base.membership import Placement
from farandole.errors import CollectiveMismatch, GenerationEnded, HorovodInternalError, PeerLost
from farandole.integrations.horovod.named.engine import NamedCollectives
from farandole.integrations.horovod.named.stages import GLOBAL_SET, Kind
from farandole.integrations.horovod.named.tensor_queue import poll, synchronize
from farandole.training.collectives.alone import AloneTransport
from tests.support.named import allreduce, engine_on, run, submit
from tests.support.thread_world import ThreadTransport, ThreadWorld

pytestmark = pytest.mark.core

DEADLINE_S = 20.0


def test_operations_are_matched_by_name_whatever_the_order_on_each_rank() -> None:
    names = [f"gradient {number}" for number in range(100)]

    def reduce_all(named: NamedCollectives) -> list[float]:
        mine = random.Random(named.rank).sample(names, len(names))
        handles = {name: allreduce(named, name, torch.tensor([float(name.split()[1])])) for name in mine}
        return [handles[name].take().item() for name in names]

    assert run(3, reduce_all) == [[3.0 * number for number in range(100)]] * 3


def test_threads_of_one_rank_may_submit_at_once() -> None:
    def reduce_all(named: NamedCollectives) -> list[float]:
        results: dict[str, float] = {}

        def from_thread(thread: int) -> None:
            for step in range(20):
                name = f"{thread}.{step}"
                results[name] = allreduce(named, name, torch.tensor([float(thread)])).take().item()

        threads = [threading.Thread(target=from_thread, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        return [results[name] for name in sorted(results)]

    expected = [2.0 * thread for thread in range(4) for _ in range(20)]
    assert run(2, reduce_all) == [expected] * 2


def test_an_operation_waits_for_the_last_rank_and_not_longer() -> None:
    submitted = threading.Event()

    def late(named: NamedCollectives) -> tuple[bool, float]:
        if named.rank == 0:
            handle = allreduce(named, "x", torch.ones(1))
            was_done = poll(handle)
            submitted.set()
        else:
            assert submitted.wait(DEADLINE_S)
            handle, was_done = allreduce(named, "x", torch.ones(1)), False
        return was_done, handle.take().item()

    assert run(2, late) == [(False, 2.0), (False, 2.0)]


def test_a_name_in_flight_is_refused_and_free_again_when_the_operation_has_ended() -> None:
    def twice(named: NamedCollectives) -> float:
        handle = allreduce(named, "x", torch.ones(1)) if named.rank == 0 else None
        if handle is not None:
            with pytest.raises(ValueError, match=r"x was submitted twice"):
                allreduce(named, "x", torch.ones(1))
        submit(named, Kind.BARRIER, "b").wait()
        handle = handle or allreduce(named, "x", torch.ones(1))
        handle.wait()
        return float(allreduce(named, "x", torch.ones(1)).take().item())

    assert run(2, twice) == [2.0, 2.0]


def test_a_barrier_passes_while_other_operations_are_outstanding() -> None:
    def outstanding(named: NamedCollectives) -> float:
        handle = allreduce(named, "x", torch.ones(1)) if named.rank == 0 else None
        submit(named, Kind.BARRIER, "b").wait()
        return float((handle or allreduce(named, "x", torch.ones(1))).take().item())

    assert run(2, outstanding) == [2.0, 2.0]


def test_all_ranks_get_an_error_where_one_has_left_for_which_another_waits() -> None:
    def leave(named: NamedCollectives) -> bool:
        handle = allreduce(named, "x", torch.ones(1)) if named.rank == 0 else named.begin_end()
        with pytest.raises(CollectiveMismatch, match="rank 1 has left the elastic function"):
            handle.take()
        named.begin_end().take()
        return bool(allreduce(named, "x", torch.ones(1)).take().item() == 2.0)

    assert run(2, leave) == [True, True]


def test_ranks_that_disagree_all_get_the_error_and_go_on() -> None:
    def disagree(named: NamedCollectives) -> float:
        dtype = torch.float32 if named.rank == 0 else torch.int64
        with pytest.raises(CollectiveMismatch, match=r"float32.*int64"):
            allreduce(named, "x", torch.ones(1, dtype=dtype)).take()
        return float(allreduce(named, "x", torch.ones(1)).take().item())

    assert run(3, disagree) == [3.0] * 3


def test_a_rank_without_data_adds_zeros_until_all_have_joined() -> None:
    def join(named: NamedCollectives) -> tuple[float, int]:
        value = 0.0
        if named.rank != 1:
            value = allreduce(named, "x", torch.ones(1)).take().item()
        joined = submit(named, Kind.JOIN, "join")
        return value, joined.take()

    values, lasts = zip(*run(3, join), strict=True)
    assert values == (2.0, 0.0, 2.0)
    assert len(set(lasts)) == 1
    assert lasts[0] in (0, 2)


def test_unnamed_operations_count_alike_again_after_a_join() -> None:
    def join(named: NamedCollectives) -> int:
        for _ in range(named.rank):
            allreduce(named, f"noname.{named.next_number(Kind.ALLREDUCE, GLOBAL_SET)}", torch.ones(1)).wait()
        submit(named, Kind.JOIN, "join").wait()
        return named.next_number(Kind.ALLREDUCE, GLOBAL_SET)

    assert run(3, join) == [0, 0, 0]


def test_a_process_set_has_connections_and_names_of_its_own() -> None:
    def halves(named: NamedCollectives) -> tuple[int, int, float]:
        even = submit(named, Kind.ADD_PROCESS_SET, "add.0", ranks=(0, 2)).take()
        odd = submit(named, Kind.ADD_PROCESS_SET, "add.1", ranks=(1,)).take()
        mine = even if named.rank in (0, 2) else odd
        value = allreduce(named, "x", torch.tensor([10.0**named.rank]), process_set=mine).take().item()
        assert submit(named, Kind.REMOVE_PROCESS_SET, "remove.0", ranks=(0, 2)).take() is True
        assert dict(named.process_sets) == {0: (0, 1, 2), odd: (1,)}
        return even, odd, value

    assert run(3, halves) == [(1, 2, 101.0), (1, 2, 10.0), (1, 2, 101.0)]


def test_an_abort_ends_what_waits_and_whatever_comes_later() -> None:
    aborted = threading.Event()

    def abort(named: NamedCollectives) -> None:
        if named.rank == 0:
            handle = allreduce(named, "x", torch.ones(1))
            named.abort("worker w7 was lost")
            named.wait_until_quiet()
            aborted.set()
            with pytest.raises(GenerationEnded, match="worker w7 was lost"):
                handle.take()
            with pytest.raises(GenerationEnded, match="worker w7 was lost"):
                submit(named, Kind.BARRIER, "y")
        assert aborted.wait(DEADLINE_S)
        with pytest.raises((GenerationEnded, PeerLost)):
            submit(named, Kind.BARRIER, "y").take()
        named.close()

    world = ThreadWorld(2)
    assert world.run(lambda transport: abort(engine_on(transport, world))) == [None, None]


def test_a_lost_rank_ends_what_waits_on_the_others() -> None:
    world = ThreadWorld(3)

    def lose_one(transport: ThreadTransport) -> type[BaseException]:
        if transport.rank == 1:
            transport.abort("killed")
            return SystemExit
        named = engine_on(transport, world)
        with pytest.raises(HorovodInternalError) as caught:
            allreduce(named, "x", torch.ones(1)).take()
        with pytest.raises(type(caught.value)):
            allreduce(named, "y", torch.ones(1))
        named.close()
        return type(caught.value)

    results = world.run(lose_one)
    assert results[1] is SystemExit
    assert {results[0], results[2]} <= {PeerLost, GenerationEnded}


def test_a_rank_that_leaves_in_good_order_ends_nothing_that_was_agreed() -> None:
    def leave(named: NamedCollectives) -> None:
        submit(named, Kind.BARRIER, "b").wait()
        named.close()
        with pytest.raises(GenerationEnded):
            allreduce(named, "x", torch.ones(1))

    for _ in range(20):
        world = ThreadWorld(3)
        assert world.run(lambda transport, world=world: leave(engine_on(transport, world))) == [None] * 3


class BrokenTransport(ThreadTransport):
    """Fails where no transport should."""

    def all_reduce(self, *args: Any, **more: Any) -> list[bytes]:
        raise ZeroDivisionError("a bug")


def test_a_bug_in_the_thread_is_an_error_for_who_waits_and_no_hang() -> None:
    named = engine_on(BrokenTransport(ThreadWorld(2), 0), ThreadWorld(2))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        allreduce(named, "x", torch.ones(1)).take()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        allreduce(named, "y", torch.ones(1))
    named.close()


@pytest.fixture
def alone() -> Any:
    named = NamedCollectives(AloneTransport(7), placement=Placement(0, 1, 0, 1, 0, 1), connect=_nobody)
    yield named
    named.close()


def _nobody(ranks: tuple[int, ...], process_set: int) -> Any:
    raise AssertionError("a world of one connects to nobody")


def test_a_world_of_one_does_it_in_the_calling_thread(alone: NamedCollectives) -> None:
    before = threading.active_count()
    handle = allreduce(alone, "x", torch.tensor([2.0]), prescale=3.0)
    assert poll(handle)
    assert handle.take().item() == 6.0
    assert submit(alone, Kind.JOIN, "join").take() == 0
    assert submit(alone, Kind.BARRIER, "b").take() is None
    assert threading.active_count() == before


def test_a_world_of_one_ends_as_others_do(alone: NamedCollectives) -> None:
    alone.abort("a planned change")
    with pytest.raises(GenerationEnded, match="generation 7 has ended: a planned change"):
        allreduce(alone, "x", torch.ones(1)).take()
    with pytest.raises(GenerationEnded, match="a planned change"):
        allreduce(alone, "y", torch.ones(1))


@pytest.mark.parametrize("handle", [None, 3, "x"])
def test_what_is_no_handle_has_no_result(handle: object) -> None:
    assert synchronize(handle) is None
    with pytest.raises(ValueError, match="handle of an asynchronous operation"):
        poll(handle)


def test_a_handle_is_good_for_one_result(alone: NamedCollectives) -> None:
    handle = allreduce(alone, "x", torch.ones(1))
    assert synchronize(handle).item() == 1.0
    assert synchronize(handle) is None
    with pytest.raises(ValueError, match="synchronized already"):
        poll(handle)


def test_a_forked_process_cannot_submit() -> None:
    def fork(named: NamedCollectives) -> int:
        if named.rank == 1:
            return 42
        child = os.fork()
        if child == 0:
            os._exit(_exit_code_of(lambda: allreduce(named, "x", torch.ones(1))))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run(2, fork) == [42, 42]


def _exit_code_of(call: Callable[[], object]) -> int:
    try:
        call()
    except RuntimeError as error:
        return 42 if "forked" in str(error) else 1
    return 0
