"""The transport through Gloo where it differs from the others: what is under way inside of Gloo when a rank ends."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch

from farandole.errors import ConfigError, GenerationEnded, PeerLost
from farandole.training.collectives.kept_group import KeptGroup
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import TransportOperation
from farandole.training.collectives.transport import Reduction, Transport
from tests.support import gloo_transport, rings
from tests.support.gloo_transport import GlooTransport, shut_down_connections, use_gloo
from tests.support.rings import DEADLINE_S, listeners, needs_reconfigure

NUMEL = 1_000_000

Kept = Sequence[KeptGroup | None]


@contextmanager
def stuck(
    kept: Kept = (None, None),
) -> Iterator[tuple[GlooTransport, RingTransport, torch.Tensor, Future[object]]]:
    """Rank 0 in an all_reduce of Gloo's, for which rank 1 has agreed but does nothing: its transport, the other
    rank's ring, the tensor, and what becomes of the call. `kept` holds the ranks' groups between generations."""
    with listeners(2) as opened:
        pair = [each for each in rings.build(opened).transports if isinstance(each, RingTransport)]
        transports = rings.in_threads(2, lambda rank: use_gloo(pair[rank], kept[rank]))
        tensor, outcome = torch.full((NUMEL,), 7.0), Future[object]()

        def reduce() -> None:
            try:
                outcome.set_result(transports[0].all_reduce(tensor))
            except BaseException as error:  # noqa: BLE001 - the test gets it
                outcome.set_exception(error)

        threading.Thread(target=reduce, daemon=True).start()
        header = pair[1].next_header(TransportOperation.ALL_REDUCE, tensor, Reduction.SUM)
        pair[1].exchange(header, b"")
        until(lambda: transports[0]._group._work is not None)
        try:
            yield transports[0], pair[1], tensor, outcome
        finally:
            for transport in transports:
                transport.close()
            until(lambda: not releasing())


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


def releasing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "farandole-gloo-release"]


def test_an_abort_ends_an_operation_inside_of_gloo_within_5_ms_and_leaves_the_tensor_alone() -> None:
    taken_s = []
    for _ in range(10):
        with stuck() as (transport, _, tensor, outcome):
            aborted_s = time.monotonic()
            transport.abort("worker w1 was lost")
            with pytest.raises(GenerationEnded, match="w1 was lost"):
                outcome.result(DEADLINE_S)
            taken_s.append(time.monotonic() - aborted_s)
        assert tensor.eq(7.0).all()  # also after the operation, and the group, have ended
    print(f"abort inside of Gloo: median {statistics.median(taken_s) * 1e3:.2f} ms, worst {max(taken_s) * 1e3:.2f} ms")
    assert min(taken_s) <= 0.005  # no timer and no poll is in the way; under load, the others wait for a core


def test_a_rank_that_is_lost_ends_an_operation_inside_of_gloo() -> None:
    with stuck() as (transport, others_ring, tensor, outcome):
        others_ring.close()
        with pytest.raises(PeerLost):
            outcome.result(DEADLINE_S)
        with pytest.raises(PeerLost):
            transport.barrier()
    assert tensor.eq(7.0).all()


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize("is_lasting", [False, pytest.param(True, marks=needs_reconfigure)])
def test_200_generations_leave_no_descriptor_and_no_thread_behind(is_lasting: bool) -> None:
    def counts() -> tuple[int, int]:
        until(lambda: not releasing())
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    kept = [KeptGroup(), KeptGroup()] if is_lasting else None
    with listeners(2) as opened:
        before: list[Transport] = []
        for number in range(1, 201):
            world = rings.build(opened, number, choice="gloo", kept=kept)
            for transport in before:
                transport.close()
            if number == 3:
                at_first = counts()
            parts = [torch.ones(1000), torch.ones(1000)]
            world.run(lambda transport, parts=parts: transport.all_reduce(parts[transport.rank]))
            before = world.transports
        until(lambda: counts() <= at_first)
        for transport in before:
            transport.close()


def test_an_address_that_gloo_cannot_use_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with listeners(2) as opened:
        pair = [each for each in rings.build(opened).transports if isinstance(each, RingTransport)]
        monkeypatch.setattr(gloo_transport, "host_of", lambda _: "no.such.host.invalid")
        outcomes = rings.outcomes_in_threads(2, lambda rank: use_gloo(pair[rank]))
        for each in pair:
            each.close()
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * 2
    assert "rank 0: cannot listen at no.such.host.invalid" in str(outcomes[1])


def sum_of(world: rings.Ring) -> list[float]:
    """What each rank has after an all-reduce of ones."""
    tensors = [torch.ones(1000) for _ in world.transports]
    world.run(lambda transport: transport.all_reduce(tensors[transport.rank]))
    return [tensor[-1].item() for tensor in tensors]


def groups(world: rings.Ring) -> list[object]:
    """torch's process groups, by rank."""
    return [each._group._group for each in world.transports if isinstance(each, GlooTransport)]


def close(*worlds: rings.Ring) -> None:
    for world in worlds:
        for transport in world.transports:
            transport.close()


@pytest.mark.core
@needs_reconfigure
def test_groups_that_live_through_the_generations_take_leave_and_newcomers() -> None:
    """Ranks change as well. A rank that was away has a new group."""
    with listeners(3) as opened:
        kept = [KeptGroup() for _ in opened]
        worlds, of_each = [], []
        for number, members in enumerate([[0, 1, 2], [0, 1], [1, 0], [2, 0, 1]], start=1):
            if number == 4:
                kept[2] = KeptGroup()
            world = rings.build(
                [opened[each] for each in members], number, None, "gloo", None, [kept[each] for each in members]
            )
            assert all(each.is_lasting for each in world.transports if isinstance(each, GlooTransport))
            of_each.append(dict(zip(members, groups(world), strict=True)))
            assert sum_of(world) == [float(len(members))] * len(members)
            close(*worlds[-1:])
            worlds.append(world)
        close(*worlds)
    assert all(each[0] is of_each[0][0] and each[1] is of_each[0][1] for each in of_each)
    assert of_each[3][2] is not of_each[0][2]


@pytest.mark.core
@needs_reconfigure
def test_the_next_generation_has_a_group_whose_operation_had_to_be_ended() -> None:
    kept = [KeptGroup(), KeptGroup()]
    with stuck(kept) as (transport, _, tensor, outcome), listeners(2) as opened:
        group = transport._group._group
        transport.abort("worker w1 was lost")
        with pytest.raises(GenerationEnded, match="w1 was lost"):
            outcome.result(DEADLINE_S)
        world = rings.build(opened, 2, choice="gloo", kept=kept)
        assert groups(world)[0] is group
        transport.abort("a late order, which concerns the generation before")
        transport.close()
        assert sum_of(world) == [2.0, 2.0]
        close(world)
    assert tensor.eq(7.0).all()


@pytest.mark.core
@needs_reconfigure
def test_a_group_whose_operation_does_not_end_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [KeptGroup(), KeptGroup()]
    with stuck(kept) as (transport, _, tensor, outcome), listeners(2) as opened:
        inner = transport._group
        group, connections = inner._group, inner._connections
        with monkeypatch.context() as patch:
            patch.setattr(gloo_transport, "_HAND_OVER_S", 0.05)
            patch.setattr(gloo_transport, "shut_down_connections", lambda connections: None)
            transport.abort("worker w1 was lost")
            with pytest.raises(GenerationEnded, match="w1 was lost"):
                outcome.result(DEADLINE_S)
            world = rings.build(opened, 2, choice="gloo", kept=kept)
        assert groups(world)[0] is not group
        assert sum_of(world) == [2.0, 2.0]
        close(world)
        shut_down_connections(connections)
    assert tensor.eq(7.0).all()


@pytest.mark.core
@needs_reconfigure
def test_all_ranks_have_new_groups_where_one_cannot_keep_its_own() -> None:
    with listeners(2) as opened:
        kept = [KeptGroup(), KeptGroup()]
        first = rings.build(opened, 1, choice="gloo", kept=kept)
        second = rings.build(opened, 2, choice="gloo", kept=[kept[0], None])
        assert not any(each.is_lasting for each in second.transports if isinstance(each, GlooTransport))
        assert sum_of(second) == [2.0, 2.0]
        close(first, second)
        third = rings.build(opened, 3, choice="gloo", kept=kept)
        assert all(each.is_lasting for each in third.transports if isinstance(each, GlooTransport))
        assert sum_of(third) == [2.0, 2.0]
        close(third)


@pytest.mark.core
@needs_reconfigure
def test_a_rank_that_is_lost_while_members_are_exchanged_ends_that_for_the_other_and_a_new_group_follows() -> None:
    with listeners(2) as opened:
        kept = [KeptGroup(), KeptGroup()]
        first = rings.build(opened, 1, choice="gloo", kept=kept)
        pair = [each for each in rings.build(opened, 2).transports if isinstance(each, RingTransport)]
        outcomes = rings.outcomes_in_threads(2, lambda rank: pair[1].close() if rank else use_gloo(pair[0], kept[0]))
        assert isinstance(outcomes[0], PeerLost)
        third = rings.build(opened, 3, choice="gloo", kept=kept)
        assert sum_of(third) == [2.0, 2.0]
        close(first, third)
        pair[0].close()
