"""What only the transport through shared memory has: tensors that are read where they are, no leaks, a way back."""

from __future__ import annotations

import gc
import logging
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from farandole.errors import CollectiveMismatch, ConfigError, GenerationEnded
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.shared_memory_group import Wanted
from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.shared_memory_transport import SharedMemoryTransport
from farandole.training.collectives.transport_choice import Way, choose
from tests.support.rings import build, in_threads, listeners, ring


def filled(rank: int, numel: int, *, is_shared: bool) -> torch.Tensor:
    tensor = shareable_zeros(numel, torch.float32) if is_shared else torch.zeros(numel)
    tensor += torch.arange(numel) % 7 + rank
    return tensor


@pytest.mark.parametrize("shared", ["all", "some", "none"])
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_are_reduced_and_passed_on_wherever_each_rank_has_its_own(size: int, shared: str) -> None:
    """Twice in a row, and over several pieces of the staging area."""
    with ring(size, choice="shm") as world:
        for numel in (20_000, 300_001, 600_000, 20_000):
            parts = [
                filled(rank, numel, is_shared={"all": True, "some": rank % 2 == 1, "none": False}[shared])
                for rank in range(size)
            ]
            expected = torch.stack(parts).sum(dim=0)
            world.run(lambda transport, parts=parts: transport.all_reduce(parts[transport.rank]))
            assert all(torch.equal(part, expected) for part in parts)
            for source in range(size):
                parts[source].fill_(source)
                world.run(lambda t, parts=parts, source=source: t.broadcast(parts[t.rank], source))
                assert all(bool((part == source).all()) for part in parts)


def test_a_part_of_a_shared_tensor_is_reduced_alone() -> None:
    whole = [filled(rank, 200_000, is_shared=True) for rank in range(2)]
    before = [each.clone() for each in whole]
    with ring(2, choice="shm") as world:
        world.run(lambda transport: transport.all_reduce(whole[transport.rank][50_000:150_000]))
    for mine, was in zip(whole, before, strict=True):
        assert torch.equal(mine[50_000:150_000], (before[0] + before[1])[50_000:150_000])
        assert torch.equal(mine[:50_000], was[:50_000])
        assert torch.equal(mine[150_000:], was[150_000:])


@pytest.mark.parametrize("shared", ["all", "some", "none"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_copies_the_parts_that_it_wants_and_no_others(size: int, shared: str) -> None:
    """Ranks have different numbers of bytes, some none, over several pieces of the staging area; twice in a row."""
    sizes = [[3_000_001, 0, 70_000], [0, 0, 5], [1_100_000, 2_200_000, 1]]
    with ring(size, choice="shm") as world:
        for by_rank in (*sizes, *sizes):
            is_shared = {"all": True, "some": lambda rank: rank % 2 == 1, "none": False}[shared]
            mine = [
                shareable_zeros(count, torch.uint8)
                if count and (is_shared(rank) if callable(is_shared) else is_shared)
                else torch.zeros(count, dtype=torch.uint8)
                for rank, count in enumerate(by_rank[:size])
            ]
            for rank, each in enumerate(mine):
                each.copy_(torch.arange(len(each)) * (rank + 3) % 251)

            def take(transport: SharedMemoryTransport, mine: Sequence[torch.Tensor] = mine) -> list[torch.Tensor]:
                """A third of the bytes of each rank, from another place on each rank."""
                wanted = [
                    Wanted(len(each) // 3 * transport.rank, torch.full((len(each) // 3,), 255, dtype=torch.uint8))
                    for each in mine
                ]
                transport.exchange(mine[transport.rank], wanted)
                mine[transport.rank].zero_()  # nobody reads it any more
                return [each.output for each in wanted]

            expected = [each.clone() for each in mine]
            for rank, found in enumerate(world.run(take)):
                for each, output in zip(expected, found, strict=True):
                    begin = len(each) // 3 * rank
                    assert torch.equal(output, each[begin : begin + len(output)])


def test_a_part_that_a_rank_does_not_have_is_a_mismatch_on_all_ranks() -> None:
    def take(transport: SharedMemoryTransport) -> None:
        wanted = Wanted(transport.rank, torch.empty(8, dtype=torch.uint8))
        with pytest.raises(CollectiveMismatch, match=r"bytes 1 to 9 of rank 0 are expected, and it has 8"):
            transport.exchange(torch.zeros(8, dtype=torch.uint8), [wanted, wanted])

    with ring(2, choice="shm") as world:
        world.run(take)


def test_a_rank_may_change_its_tensor_as_soon_as_its_own_call_is_over() -> None:
    """Others may still be copying from it, unless the end of the call is a barrier."""
    parts = [shareable_zeros(500_000, torch.float32) for _ in range(3)]

    def sums(rank: int) -> list[float]:
        seen = []
        for number in range(30):
            parts[rank].fill_(number)
            world.transports[rank].all_reduce(parts[rank])
            seen += [parts[rank].min().item(), parts[rank].max().item()]
            parts[rank].fill_(-1000)
        return seen

    with ring(3, choice="shm") as world:
        assert in_threads(3, sums) == [[3.0 * number for number in range(30) for _ in (0, 1)]] * 3


@pytest.mark.long
def test_200_generations_leave_no_descriptor_and_no_mapping_behind() -> None:
    buffers = [shareable_zeros(100_000, torch.float32) for _ in range(2)]

    def one_generation() -> None:
        world = build(opened, choice="shm")
        world.run(lambda transport: transport.all_reduce(buffers[transport.rank]))
        world.run(lambda transport: transport.all_reduce(torch.zeros(100_000)))
        for transport in world.transports:
            transport.close()

    def held() -> tuple[int, int]:
        gc.collect()
        mappings = Path("/proc/self/maps").read_text().count("memfd:farandole")
        return len(os.listdir("/proc/self/fd")), mappings

    with listeners(2) as opened:
        one_generation()
        before = held()
        for _ in range(200):
            one_generation()
        assert held() == before


@pytest.mark.parametrize("choice", ["shm", "hierarchical"])
def test_a_closed_transport_holds_no_memory_and_may_still_be_aborted(choice: str) -> None:
    with listeners(3) as opened:
        before = len(os.listdir("/proc/self/fd"))
        world = build(opened, choice=choice)
        world.run(lambda transport: transport.all_reduce(torch.zeros(100_000)))
        for transport in world.transports:
            transport.close()
            transport.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert "memfd:farandole" not in Path("/proc/self/maps").read_text()
        for transport in world.transports:
            transport.abort("nobody is there any more")
            with pytest.raises(GenerationEnded):
                transport.all_reduce(torch.zeros(1))


# The choice ------------------------------------------------------------------------------------------------

ONE_HOST, TWO_HOSTS = [0, 0], [0, 1]


def no_ring(ranks: Sequence[int], number: int) -> RingTransport:
    raise AssertionError(f"asked for a ring of {ranks}")


def test_workers_of_one_host_get_shared_memory_and_those_of_two_the_ring() -> None:
    for hosts, choice, expected in (
        (ONE_HOST, "auto", SharedMemoryTransport),
        (ONE_HOST, "tcp", RingTransport),
        (TWO_HOSTS, "auto", RingTransport),
    ):
        with ring(2) as world:
            chosen = in_threads(2, lambda rank, w=world, h=hosts, c=choice: choose(w.transports[rank], h, c, no_ring))
            assert [type(transport) for transport, _ in chosen] == [expected] * 2


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1]], ids=["one host", "two hosts"])
def test_where_one_rank_has_no_shared_memory_all_take_the_ring_and_one_says_so(
    hosts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Files of this process may not be larger than 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ring(3) as world, caplog.at_level(logging.WARNING, "farandole"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            chosen = in_threads(3, lambda rank: choose(world.transports[rank], hosts, "auto", no_ring))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert chosen == [(transport, Way.TCP) for transport in world.transports]
        tensors = [torch.ones(100_000) for _ in range(3)]
        world.run(lambda transport: transport.all_reduce(tensors[transport.rank]))
        assert all(bool((tensor == 3).all()) for tensor in tensors)
    assert len(caplog.messages) == 1
    assert "tensors are sent over TCP; shared memory cannot be used: rank" in caplog.text


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1, 1]], ids=["one host", "two hosts"])
def test_shared_memory_that_is_asked_for_and_cannot_be_had_is_an_error(hosts: list[int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    choice = "shm" if len(set(hosts)) == 1 else "hierarchical"
    with ring(len(hosts)) as world:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            outcomes = world.outcomes(lambda transport: choose(transport, hosts, choice, no_ring))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * len(hosts)
    assert all(f"--transport {choice}: shared memory cannot be used: rank" in str(outcome) for outcome in outcomes)
