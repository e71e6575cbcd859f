"""Transports of tensors on devices where they differ from the others: how devices are connected, or not. The groups
that connect them are Gloo's here, and the devices the host's memory; tests/gpu has NCCL and CUDA."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from farandole.errors import CollectiveMismatch, ConfigError, GenerationEnded, PeerLost
from farandole.training.collectives import device_transport
from farandole.training.collectives.connection_pair import DTYPES
from farandole.training.collectives.device_transport import DeviceTransport, StagedTransport
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.torch_group import Construction, ExchangedStore
from farandole.training.collectives.transport import Reduction
from farandole.training.collectives.transport_choice import host_transport
from tests.support import rings
from tests.support.rings import GlooDevices, listeners


@contextmanager
def pair() -> Iterator[list[RingTransport]]:
    with listeners(2) as opened:
        built = [each for each in rings.build(opened).transports if isinstance(each, RingTransport)]
        try:
            yield built
        finally:
            for each in built:
                each.close()


def transports(built: list[RingTransport], numbers: list[int], is_required: bool) -> list[DeviceTransport]:
    """Upon two rings, for devices with these numbers."""
    return [
        DeviceTransport(StagedTransport(ring, is_host=lambda _: False), ring, GlooDevices(number), is_required)
        for ring, number in zip(built, numbers, strict=True)
    ]


def reduce_twice(made: list[DeviceTransport]) -> None:
    tensors = [torch.ones(1000), torch.ones(1000)]
    for _ in range(2):
        notes = rings.in_threads(2, lambda rank: made[rank].all_reduce(tensors[rank], bytes([rank])))
        assert notes == [[b"\0", b"\1"]] * 2
    assert all(tensor.eq(4).all() for tensor in tensors)


def test_workers_that_share_a_device_go_through_the_host_and_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transport, "_warned", set())
    with caplog.at_level(logging.WARNING, "farandole"):
        for _ in range(2):  # generations
            with pair() as built:
                reduce_twice(transports(built, [7, 7], is_required=False))
    assert [record.message for record in caplog.records] == [
        "tensors on devices are copied through the memory of the host; Gloo is not used: ranks 0, 1 share a device"
    ]


def test_workers_that_share_a_device_end_with_an_error_on_each_where_that_was_asked_for() -> None:
    with pair() as built:
        made = transports(built, [7, 7], is_required=True)
        outcomes = rings.outcomes_in_threads(2, lambda rank: made[rank].broadcast(torch.ones(1), 0))
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * 2
    assert str(outcomes[1]) == "--transport gloo: ranks 0, 1 share a device; use auto"


def test_a_worker_has_one_device() -> None:
    with pair() as built:
        made = transports(built, [1, 2], is_required=True)
        rings.in_threads(2, lambda rank: made[rank].all_reduce(torch.ones(1)))
        for each in made:
            each._device = torch.device("cuda", 3)
            with pytest.raises(ValueError, match=r"on cpu, and the first tensor of this generation was on cuda:3"):
                each.all_reduce(torch.ones(1))
            each.close()


def test_a_rank_that_is_in_another_operation_when_devices_are_connected_is_told() -> None:
    with pair() as built:
        made = transports(built, [1, 2], is_required=True)
        outcomes = rings.outcomes_in_threads(
            2, lambda rank: made[rank].barrier() if rank else made[rank].all_reduce(torch.ones(1))
        )
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatch] * 2
    assert "all_reduce_on_device of 4 bytes of float32 (operation 1)" in str(outcomes[1])


def test_the_transport_of_the_host_is_found_below_all_others() -> None:
    with pair() as built:
        assert host_transport(transports(built, [1, 2], is_required=True)[0]) is built[0]
        assert host_transport(built[1]) is built[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_staged_tensors_are_those_of_the_transport_below(dtype: torch.dtype) -> None:
    with rings.ring(2, choice="shm") as world:
        staged = [StagedTransport(each, is_host=lambda _: False) for each in world.transports]
        for numel in (0, 1, 70_000, 1000):
            tensors = [torch.full((numel,), 2 + rank).to(dtype) for rank in range(2)]
            notes = rings.in_threads(2, lambda rank, of=tensors: staged[rank].all_reduce(of[rank], bytes([rank])))
            assert notes == [[b"\0", b"\1"]] * 2
            assert all(tensor.eq(5).all() for tensor in tensors)
            rings.in_threads(2, lambda rank, of=tensors: staged[rank].all_reduce(of[rank], op=Reduction.MAX))
            tensors[1].fill_(9)
            rings.in_threads(2, lambda rank, of=tensors: staged[rank].broadcast(of[rank], 1))
            assert all(tensor.eq(9).all() for tensor in tensors)


def test_a_staged_tensor_stays_as_it_is_when_the_transport_below_ends() -> None:
    with rings.ring(2, choice="shm") as world:
        staged = StagedTransport(world.transports[0], is_host=lambda _: False)
        tensor = torch.full((70_000,), 7.0)
        threading.Timer(0.05, staged.abort, ["worker w1 was lost"]).start()
        with pytest.raises(GenerationEnded, match="w1 was lost"):
            staged.all_reduce(tensor)
        assert tensor.eq(7.0).all()


# A group in the making ---------------------------------------------------------------------------------------


class Making:
    """The parts of a construction: a group that needs the other rank's value, and takes its time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.given_up = threading.Event()
        self.goes_on = threading.Event()
        self.problem = ""

    def make(self, store: ExchangedStore) -> str:
        store.set(f"of rank {self.rank}", b"%d" % self.rank)
        if self.problem:
            raise RuntimeError(self.problem)
        return store.get(f"of rank {1 - self.rank}").decode()

    def connect(self, group: str) -> None:
        while not (self.goes_on.wait(0.001) or self.given_up.is_set()):
            pass

    def give_up(self, group: str) -> None:
        self.given_up.set()

    def construct(self, ring: RingTransport) -> str:
        return Construction(ring, self.make, self.connect, self.give_up, 5.0, "making").finish()


@contextmanager
def making() -> Iterator[tuple[list[RingTransport], list[Making]]]:
    both = [Making(0), Making(1)]
    with pair() as built:
        yield built, both
    for each in both:
        each.goes_on.set()


def test_a_group_is_there_when_it_can_be_used_on_all_ranks() -> None:
    with making() as (built, both):
        both[0].goes_on.set()
        threading.Timer(0.02, both[1].goes_on.set).start()
        assert rings.in_threads(2, lambda rank: both[rank].construct(built[rank])) == ["1", "0"]
        assert both[1].goes_on.is_set()
        assert not any(each.given_up.is_set() for each in both)
        rings.in_threads(2, lambda rank: built[rank].barrier())


def test_what_goes_wrong_on_one_rank_is_known_to_all_at_once() -> None:
    with making() as (built, both):
        both[1].problem = "its device is full"
        said = rings.in_threads(2, lambda rank: both[rank].construct(built[rank]))
        assert said == ["rank 1: its device is full"] * 2
        rings.in_threads(2, lambda rank: built[rank].barrier())


def test_an_abort_ends_the_wait_for_a_group_and_the_group() -> None:
    with making() as (built, both):
        threading.Timer(0.1, built[0].abort, ["worker w2 was lost"]).start()
        outcomes = rings.outcomes_in_threads(2, lambda rank: both[rank].construct(built[rank]))
        assert [type(outcome) for outcome in outcomes] == [GenerationEnded, PeerLost]
        assert all(each.given_up.wait(5) for each in both)


def test_a_rank_that_is_lost_ends_the_wait_for_a_group() -> None:
    with making() as (built, both):
        threading.Timer(0.05, built[1].close).start()
        with pytest.raises(PeerLost):  # and not the store's TimeoutError
            both[0].construct(built[0])
