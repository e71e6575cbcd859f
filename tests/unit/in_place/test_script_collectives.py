"""Collectives that a script calls: completed when a worker is lost, or answered without any other worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.errors import PeerLost
from farandole.integrations.torchrun.in_place.script_collectives import EchoTransport, SurvivingTransport
from farandole.training.collectives import world
from farandole.training.collectives.transport import Reduction
from farandole.training.worker.worker_recovery import BodyCalls
from tests.support.thread_world import ThreadTransport, ThreadWorld


@pytest.fixture(autouse=True)
def a_world_that_is_broken() -> Iterator[None]:
    """The world of three workers in which every collective fails: rank 1 is lost."""
    broken: Any = Broken()
    world.enter(world.World(GenerationId(1, 1, 1, "test"), Placement(0, 3, 0, 3, 0, 1), broken))
    yield
    world.enter(None)


class Broken:
    def all_reduce(self, *_: Any) -> Any:
        raise PeerLost("all_reduce", 1, 1)

    def all_gather(self, *_: Any) -> Any:
        raise PeerLost("all_gather", 1, 1)

    def broadcast(self, *_: Any) -> Any:
        raise PeerLost("broadcast", 1, 1)

    def barrier(self) -> Any:
        raise PeerLost("barrier", 1, 1)


lacks: list[int] = []
"""Ranks that have noted a missing contribution."""


def among_two(use: Any) -> list[Any]:
    """The results of ranks 0 and 2 of the broken world, which are connected again as ranks 0 and 1 of two."""

    def run(transport: ThreadTransport) -> Any:
        is_connected = False

        def connect() -> None:
            nonlocal is_connected
            is_connected = True

        calls = BodyCalls(lambda: 1, lambda: True, lambda: is_connected, connect, lambda: transport)
        placement = Placement(2 * transport.rank, 3, 0, 1, 0, 1)
        result = use(
            SurvivingTransport(calls, placement, lambda: lacks.append(transport.rank), lambda _: None), transport.rank
        )
        calls.gather_at_boundaries(transport, b"")
        return result

    return ThreadWorld(2).run(run)


def test_a_sum_lacks_the_contribution_of_the_lost_worker() -> None:
    def use(transport: SurvivingTransport, number: int) -> Any:
        tensor = torch.tensor([1.0 + number, 10.0])
        trailers = transport.all_reduce(tensor, bytes([number]), Reduction.SUM)
        return tensor.tolist(), trailers

    expected = ([3.0, 20.0], [b"\0", b"\1", b"\0"])  # the lowest rank's trailer in place of the lost one's
    lacks.clear()
    assert among_two(use) == [expected, expected]
    assert sorted(lacks) == [0, 1]


@pytest.mark.parametrize(("op", "value"), [(Reduction.MIN, 2), (Reduction.MAX, 5), (Reduction.PRODUCT, 10)])
def test_other_reductions_are_those_of_the_remaining_workers(op: Reduction, value: int) -> None:
    def use(transport: SurvivingTransport, number: int) -> Any:
        tensor = torch.tensor([2 + 3 * number])
        transport.all_reduce(tensor, b"", op)
        return tensor.item()

    assert among_two(use) == [value, value]


def test_a_list_is_as_long_as_the_script_expects() -> None:
    found = among_two(lambda transport, number: transport.all_gather(b"abc"[number : number + 1]))
    assert found == [[b"a", b"b", b"a"]] * 2


@pytest.mark.parametrize(("source", "value"), [(0, 0.0), (2, 1.0), (1, 0.0)])
def test_a_broadcast_has_one_value_on_all_also_when_its_source_is_lost(source: int, value: float) -> None:
    def use(transport: SurvivingTransport, number: int) -> Any:
        tensor = torch.full((2,), float(number), dtype=torch.bfloat16)
        transport.broadcast(tensor, source)
        transport.barrier()
        return tensor.tolist()

    lacks.clear()
    assert among_two(use) == [[value, value]] * 2
    assert bool(lacks) == (source == 1)


def test_a_worker_that_passes_over_is_answered_as_if_all_had_done_the_same() -> None:
    transport = EchoTransport(rank=2, size=3)
    tensor = torch.tensor([2])
    assert transport.all_reduce(tensor, b"x") == [b"x"] * 3
    assert tensor.item() == 6
    transport.all_reduce(tensor, b"", Reduction.MAX)
    transport.broadcast(tensor, source=0)
    transport.barrier()
    assert tensor.item() == 6
    assert transport.all_gather(b"y") == [b"y"] * 3
