"""Shared memory within hosts, rings across: what is special about it. test_transports.py has what all must do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.errors import CollectiveMismatch
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.transport import Transport
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job
from tests.support.rings import DEADLINE_S, Ring, build, listeners

SHAPES = [[0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 1, 2, 1, 0], [0, 1, 1, 1]]


@contextmanager
def world_on(hosts: list[int], check: Callable[[], None] | None = None) -> Iterator[Ring]:
    with listeners(len(hosts)) as opened:
        world = build(opened, check=check, choice="hierarchical", on_hosts={len(hosts): hosts})
        try:
            yield world
        finally:
            for transport in world.transports:
                transport.close()


@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_ranks_may_be_on_any_hosts_in_any_order(hosts: list[int]) -> None:
    size = len(hosts)

    def work(transport: Transport) -> None:
        rank = transport.rank
        for numel in (1, 3000, 2_500_000):
            tensor = torch.full((numel,), float(rank))
            trailers = transport.all_reduce(tensor, b"trailer of %d" % rank)
            assert trailers == [b"trailer of %d" % other for other in range(size)]
            assert tensor.min() == tensor.max() == sum(range(size))
            for source in range(size):
                tensor = torch.full((numel,), float(rank))
                transport.broadcast(tensor, source)
                assert tensor.min() == tensor.max() == source
        assert transport.all_gather(b"%d" % rank) == [b"%d" % other for other in range(size)]

    with world_on(hosts) as world:
        world.run(work)
        assert world.hints == [[]] * size


@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_all_get_the_same_bits_also_where_only_some_tensors_can_be_read_in_place(hosts: list[int]) -> None:
    size, numel = len(hosts), 2_500_001
    parts = []
    for rank in range(size):
        tensor = shareable_zeros(numel, torch.float32) if rank % 2 else torch.empty(numel)
        parts.append(tensor.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(rank))))
    exact = torch.stack(parts).double().sum(dim=0)
    with world_on(hosts) as world:
        world.run(lambda transport: transport.all_reduce(parts[transport.rank]))
    assert all(torch.equal(part.view(torch.uint8), parts[0].view(torch.uint8)) for part in parts)
    torch.testing.assert_close(parts[0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numel", [20, 100_000])
@pytest.mark.parametrize("goes", [False, True])
def test_a_host_that_is_behind_takes_it_for_no_news_that_another_one_has_finished(numel: int, goes: bool) -> None:
    """Rank 2 waits for rank 3, and sees meanwhile that rank 1 is in the next operation, or gone."""
    seconds: list[None] = []
    is_late = threading.Event()

    def note_second() -> None:
        seconds.append(None)  # somebody has waited for one more
        if len(seconds) == 2:
            is_late.set()

    def work(transport: Transport) -> float:
        tensor = torch.full((numel,), float(transport.rank))
        if transport.rank == 3:
            assert is_late.wait(DEADLINE_S)
        transport.broadcast(tensor, 0)
        if goes:
            transport.close()
        else:
            transport.barrier()
        return tensor[-1].item()

    with world_on([0, 0, 1, 1], check=note_second) as world:
        assert world.run(work) == [0.0] * 4
        assert world.hints == [[]] * 4


@pytest.mark.parametrize("odd", range(5))
@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_a_rank_with_another_tensor_is_found_on_every_rank(odd: int, numel: int) -> None:
    with world_on([0, 0, 1, 1, 2]) as world:
        outcomes = world.outcomes(lambda transport: transport.all_reduce(torch.zeros(numel + (transport.rank == odd))))
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatch] * 5
    for outcome in outcomes:
        assert f"rank {odd} is in all_reduce of {4 * numel + 4} bytes of float32" in str(outcome)
        assert f"all_reduce of {4 * numel} bytes of float32" in str(outcome)


def test_100_generations_leave_no_descriptor_behind() -> None:
    counts = []
    with listeners(3) as opened:
        for number in range(1, 101):
            world = build(opened, number, choice="hierarchical")
            world.run(lambda transport: transport.all_reduce(torch.ones(50_000)))
            for transport in world.transports:
                transport.close()
            del world
            counts.append(len(os.listdir("/dev/fd")))
    assert counts[-1] <= counts[0] + 1, counts


# Whole jobs: two names of this machine are two hosts ---------------------------------------------------------

TWO_HOSTS = ["-np", "4", "-H", "localhost:2,127.0.0.1:2"]


def test_survivors_of_a_kill_go_on_and_the_replacement_joins(tmp_path: Path) -> None:
    """At first any worker, then a leader."""
    stop = tmp_path / "stop"
    arguments = ["--epochs", "1000000", "--stop", str(stop)]
    flags = [*TWO_HOSTS, "--verbose"]
    with RunningJob(flags, ELASTIC_JOB, arguments, tmp_path, tmp_path / "output") as running:
        latest = running.wait_until(all_training(4), 60)
        for victim in (1, 2):
            generation = latest[0]["generation"]
            running.kill(latest[victim]["pid"])
            latest = running.wait_until(replaced(generation), 60)
        stop.touch()
        assert running.wait(60) == 0, (tmp_path / "output").read_text()
    check_job(Proof(tmp_path), samples=600, workers_at_end=4)
    assert Proof(tmp_path).redone() <= 2
    said = (tmp_path / "output").read_text()
    assert "transport of generation 1: shared memory on each host, TCP between the hosts" in said


def replaced(generation: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
    return lambda latest: all_training(4)(latest) and latest[0]["generation"] > generation
