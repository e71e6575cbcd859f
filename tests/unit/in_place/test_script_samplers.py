"""The batches that the samplers of a script list for all workers: those that each worker would get under torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from farandole.errors import ConfigError
from farandole.integrations.torchrun.in_place.script_samplers import (
    advance,
    listed,
    may_be_divided,
    names_of,
    numbered_sampler,
    refuse_undivided,
    shuffles,
)

WORKERS, SAMPLES = 3, 30
TABLE = TensorDataset(torch.arange(SAMPLES))


class Reversed(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([*super().__iter__()][::-1])


class Weighted(Sampler[int]):
    """A draw for each epoch, of which each rank has every third sample."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas, self.epoch = rank, num_replicas, 0
        self.weights = torch.arange(1.0, SAMPLES + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        drawn = torch.multinomial(self.weights, 24, replacement=True, generator=generator)
        return iter(drawn[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return 24 // self.num_replicas


class Grouped(BatchSampler):
    """Batches of samples of one group, as detection references have them."""

    def __init__(self, sampler: Sampler[int], groups: list[int], batch_size: int) -> None:
        self.sampler, self.groups, self.batch_size = sampler, groups, batch_size  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        waiting: dict[int, list[int]] = {}
        count = 0
        for index in self.sampler:
            group = waiting.setdefault(self.groups[index], [])  # type: ignore[index]
            group.append(index)  # type: ignore[arg-type]
            if len(group) == self.batch_size and count < len(self):
                count += 1
                yield waiting.pop(self.groups[index])  # type: ignore[index]
        left = [each for group in waiting.values() for each in group]
        while count < len(self):
            count += 1
            yield (left * self.batch_size)[: self.batch_size]
            left = left[1:] + left[:1]

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size  # type: ignore[arg-type]


class OwnNumbers(Sampler[int]):
    """Shuffles with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, process_index: int, num_processes: int) -> None:
        self.process_index, self.num_processes = process_index, num_processes
        self.random = random.Random(5)
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.order)
        return iter(self.order[self.process_index :: self.num_processes])


class Sharded(BatchSampler):
    """Every third batch of another batch sampler."""

    def __init__(self, inner: BatchSampler, rank: int, world: int) -> None:
        self.inner, self.rank, self.world = inner, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for number, batch in enumerate(self.inner) if number % self.world == self.rank)


def plain(rank: int) -> DataLoader[Any]:
    return DataLoader(TABLE, 4, sampler=DistributedSampler(TABLE, WORKERS, rank))


def in_batch_sampler(rank: int) -> DataLoader[Any]:
    return DataLoader(TABLE, batch_sampler=BatchSampler(DistributedSampler(TABLE, WORKERS, rank), 4, drop_last=True))


def backwards(rank: int) -> DataLoader[Any]:
    return DataLoader(TABLE, 4, sampler=Reversed(TABLE, WORKERS, rank))


def weighted(rank: int) -> DataLoader[Any]:
    return DataLoader(TABLE, 4, sampler=Weighted(rank, WORKERS))


def grouped(rank: int) -> DataLoader[Any]:
    sampler = DistributedSampler(TABLE, WORKERS, rank)
    return DataLoader(TABLE, batch_sampler=Grouped(sampler, [each % 3 for each in range(SAMPLES)], 2))


def own_numbers(rank: int) -> DataLoader[Any]:
    return DataLoader(TABLE, 5, sampler=OwnNumbers(rank, WORKERS))


def sharded(rank: int) -> DataLoader[Any]:
    return DataLoader(TABLE, batch_sampler=Sharded(BatchSampler(range(SAMPLES), 5, False), rank, WORKERS))


@pytest.mark.parametrize("make", [plain, in_batch_sampler, backwards, weighted, grouped, own_numbers, sharded])
def test_each_worker_knows_the_batches_of_all(make: Callable[[int], DataLoader[Any]]) -> None:
    loaders = [make(rank) for rank in range(WORKERS)]
    for epoch in range(3):
        for theirs in loaders:
            if hasattr(numbered_sampler(theirs), "set_epoch"):
                numbered_sampler(theirs).set_epoch(epoch)
        found = [listed(theirs, WORKERS, lambda _: nullcontext()) for theirs in loaders]
        assert len({each.digest for each in found}) == 1
        for rank, theirs in enumerate(loaders):
            assert found[0].rest(0, rank, WORKERS) == [list(batch) for batch in theirs.batch_sampler]  # type: ignore[union-attr]


def test_a_sampler_with_numbers_of_its_own_goes_on_as_under_torch() -> None:
    ours, theirs = own_numbers(0), own_numbers(0)
    for _ in range(3):
        found = listed(ours, WORKERS, lambda _: nullcontext())
        advance(ours)
        assert found.rest(0, 0, WORKERS) == [list(batch) for batch in theirs.batch_sampler]  # type: ignore[union-attr]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Listed(Sampler[Any]):
    """A sampler of what a function returns."""

    def __init__(self, make: Callable[[], Any], rank: int = 0) -> None:
        self.make, self.rank = make, rank

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


class ByRank(Sampler[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, SAMPLES - 8 * self.rank, 3))


class GoingOn(Sampler[int]):
    """A sampler whose order goes on from epoch to epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.indices = (each for _ in range(100) for each in range(rank, SAMPLES, WORKERS))

    def __iter__(self) -> Iterator[int]:
        return islice(self.indices, SAMPLES // WORKERS)


def endless() -> Iterator[int]:
    while True:
        yield 1


def unsuitable(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=2)
    if kind == "undivided":
        return DataLoader(TABLE, batch_size=2, shuffle=True)
    if kind == "no batches":
        return DataLoader(TABLE, batch_size=None, sampler=DistributedSampler(TABLE, WORKERS, 0))
    if kind == "other data":
        other = TensorDataset(torch.arange(SAMPLES + 3))
        return DataLoader(TABLE, batch_size=2, sampler=DistributedSampler(other, WORKERS, 0))
    if kind == "unequal":
        return DataLoader(TABLE, batch_size=2, sampler=ByRank(0))
    if kind == "going on":
        return DataLoader(TABLE, batch_size=2, sampler=GoingOn(0))
    kinds: dict[str, Callable[[], Any]] = {
        "torch's numbers": lambda: torch.randperm(SAMPLES).tolist(),
        "numpy's numbers": lambda: np.random.permutation(SAMPLES),
        "endless": endless,
        "keys": lambda: ["a", "b"],
        "alike": lambda: range(SAMPLES),
        "nothing": list,
    }
    return DataLoader(TABLE, batch_size=2, sampler=Listed(kinds[kind]))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stream", "an IterableDataset"),
        ("undivided", "has a RandomSampler, and no DistributedSampler"),
        ("no batches", "batch_size=None"),
        ("other data", "DistributedSampler lists sample 3., and the data set of its DataLoader has 30"),
        ("unequal", "its sampler ByRank lists 5 batches for rank 0 and"),
        ("torch's numbers", "its sampler Listed draws from the random numbers of its process"),
        ("numpy's numbers", "its sampler Listed draws from the random numbers of its process"),
        ("endless", "does not end"),
        ("keys", "other things than numbers"),
        ("going on", "its sampler GoingOn keeps an iterator .indices., which cannot be copied"),
        ("alike", "its sampler Listed gives all workers the same samples"),
        ("nothing", "gives all workers the same samples"),
    ],
)
def test_a_loader_whose_batches_cannot_be_listed_is_refused_with_the_reason(kind: str, reason: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=reason):
        listed(unsuitable(kind), WORKERS, lambda _: nullcontext())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_that_is_refused_goes_on_where_it_was() -> None:
    loader = unsuitable("going on")
    with pytest.raises(ConfigError):
        listed(loader, WORKERS, lambda _: nullcontext())
    assert next(iter(loader.sampler)) == 0


def test_a_sampler_that_tells_time_is_refused() -> None:
    clock = iter(range(100))
    theirs = DataLoader(TABLE, batch_size=2, sampler=Listed(lambda: [next(clock) % 7, 1]))
    with pytest.raises(ConfigError, match="other batches each time"):
        listed(theirs, 1, lambda _: nullcontext())


def test_a_data_set_that_has_grown_is_refused_as_by_torch() -> None:
    table = TensorDataset(torch.arange(8))
    theirs = DataLoader(table, 4, sampler=DistributedSampler(table, 2, 0))
    table.tensors = (torch.arange(12),)
    with pytest.raises(ConfigError, match="another length than 12"):
        listed(theirs, 2, lambda _: nullcontext())


def test_samplers_of_torch_that_divide_nothing_are_told_from_others() -> None:
    assert may_be_divided(weighted(0))
    assert may_be_divided(in_batch_sampler(0))
    assert not may_be_divided(DataLoader(TABLE, 2))
    assert not may_be_divided(DataLoader(TABLE, 2, shuffle=True))
    with pytest.raises(ConfigError, match="SequentialSampler"):
        refuse_undivided(DataLoader(TABLE, 2))


def test_what_a_sampler_says_about_its_order() -> None:
    assert shuffles(plain(0))
    assert shuffles(weighted(0))
    assert not shuffles(DataLoader(TABLE, 2, sampler=DistributedSampler(TABLE, WORKERS, 0, shuffle=False)))
    assert names_of(plain(0)) == "DistributedSampler"
    assert names_of(grouped(0)) == "Grouped of DistributedSampler"


class Strange(Dataset[Any]):
    """Items that nobody can copy."""

    def __len__(self) -> int:
        return SAMPLES

    def __deepcopy__(self, _: object) -> Any:
        raise AssertionError("the data set was copied")


def test_the_data_set_is_not_copied() -> None:
    data = Strange()
    theirs = DataLoader(data, 4, sampler=Reversed(data, WORKERS, 0))
    assert listed(theirs, WORKERS, lambda _: nullcontext()).size == SAMPLES
