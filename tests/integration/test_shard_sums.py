"""Shards are added up with the same bits by every transport, whoever has computed them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from farandole.errors import CollectiveMismatch, ConfigError, RecoverableError
from farandole.training.collectives.shard_sums import with_shards
from farandole.training.collectives.shard_tree import Division, divide, divide_evenly, leaves
from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.transport import Transport
from tests.support.rings import ring

pytestmark = pytest.mark.core

CHOICES = ["tcp", "shm", "hierarchical"]
NUMELS = [1, 7, 1000, 20_000, 700_001]
"""From one message slot, and one hop of a ring, to several blocks for each rank."""


def shards_of(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    magnitudes = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return list((torch.randn(count, numel, generator=generator) * magnitudes).to(dtype))


def tree_sum(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = list(shards)
    while len(sums) > 1:
        pairs = [sums[place] + sums[place + 1] for place in range(0, len(sums) - 1, 2)]
        sums = pairs + (sums[-1:] if len(sums) % 2 else [])
    return sums[0]


def rows_of(shards: Sequence[torch.Tensor], division: Division, rank: int, is_shared: bool) -> list[torch.Tensor]:
    """The sums of a rank before the collective."""
    start, stop = division.ranges[rank]
    numel, dtype = shards[0].numel(), shards[0].dtype
    make = shareable_zeros if is_shared else torch.zeros
    sums: list[torch.Tensor] = []
    for shard, leaf in zip(range(start, stop), leaves(start, stop, division.shards), strict=True):
        total = shards[shard].clone()
        for _ in range(leaf.summands):
            torch.add(sums.pop(), total, out=total)
        sums.append(total)
    rows = [make(numel, dtype=dtype) for _ in range(division.rows(rank))]
    for row, total in zip(rows, sums, strict=False):
        row.copy_(total)
    return rows


def added(
    transport: Transport, shards: Sequence[torch.Tensor], division: Division, is_shared: bool, factor: float = 1.0
) -> torch.Tensor:
    rows = rows_of(shards, division, transport.rank, is_shared)
    trailers = with_shards(transport).all_reduce_shards(rows, division, bytes([transport.rank, 7]), factor)
    assert trailers == [bytes([rank, 7]) for rank in range(transport.size)]
    return rows[0]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_sum_is_that_of_the_tree_whatever_the_division(choice: str, size: int) -> None:
    with ring(size, choice=choice) as world:
        for count in (4, 6, 8, 13):
            divisions = [divide_evenly(count, size), divide(count, tuple(range(size, 0, -1)))]
            divisions.append(divide(count, (0,) * (size - 1) + (1,)))
            for numel in NUMELS:
                shards = shards_of(count, numel)
                expected = tree_sum(shards)
                for division in divisions:
                    for is_shared in (True, False):
                        found = world.run(lambda t: added(t, shards, division, is_shared))  # noqa: B023
                        assert all(torch.equal(each, expected) for each in found), (count, numel, division, is_shared)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_sum_is_multiplied_after_the_additions(choice: str, size: int) -> None:
    with ring(size, choice=choice) as world:
        for numel in NUMELS:
            shards = shards_of(7, numel)
            for division in (divide_evenly(7, size), divide(7, (0,) * (size - 1) + (1,))):
                found = world.run(lambda t: added(t, shards, division, True, 1 / 7))  # noqa: B023
                assert all(torch.equal(each, tree_sum(shards) * (1 / 7)) for each in found), (numel, division)


@pytest.mark.parametrize("choice", CHOICES)
def test_other_dtypes_are_rounded_alike_and_other_operations_may_come_between(choice: str) -> None:
    with ring(3, choice=choice) as world:
        division = divide_evenly(7, 3)
        for dtype in (torch.bfloat16, torch.float64, torch.int64):
            for numel in (5, 40_000, 300_000):
                shards = shards_of(7, numel, dtype)
                found = world.run(lambda t: added(t, shards, division, True))  # noqa: B023
                assert all(torch.equal(each, tree_sum(shards)) for each in found)
                ones = world.run(lambda t: (x := torch.ones(50_000), t.all_reduce(x), t.barrier())[0])
                assert all(torch.equal(each, torch.full((50_000,), 3.0)) for each in ones)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("numel", [10, 300_000])
def test_ranks_with_other_numbers_of_shards_learn_of_the_mismatch(choice: str, numel: int) -> None:
    def add(transport: Transport) -> None:
        division = divide_evenly(4 if transport.rank else 8, 3)
        with_shards(transport).all_reduce_shards(rows_of(shards_of(8, numel), division, transport.rank, True), division)

    with ring(3, choice=choice) as world:
        outcomes = world.outcomes(add)
        assert all(isinstance(each, CollectiveMismatch | RecoverableError) for each in outcomes), outcomes
        assert any("shards" in str(each) for each in outcomes if isinstance(each, CollectiveMismatch))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_rank_that_goes_ends_the_operation_of_the_others(choice: str) -> None:
    def add(transport: Transport) -> None:
        if transport.rank == 1:
            transport.close()
            return
        added(transport, shards_of(6, 300_000), divide_evenly(6, 3), True)

    with ring(3, choice=choice) as world:
        outcomes = world.outcomes(add)
        assert outcomes[1] is None
        assert isinstance(outcomes[0], RecoverableError)
        assert isinstance(outcomes[2], RecoverableError)


def test_gloo_has_an_order_of_its_own() -> None:
    with ring(2, choice="gloo") as world, pytest.raises(ConfigError, match="leave --transport out, or use shm"):
        with_shards(world.transports[0])
