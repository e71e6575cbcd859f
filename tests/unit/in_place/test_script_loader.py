"""A script's DataLoader as a loader of Farandole: with the workers of the start, each gets torch's batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from farandole.base.membership import GenerationId, Placement
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_samplers import listed
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.state import step


def make(samples: int, batch_size: int, rank: int, workers: int, **arguments: Any) -> DataLoader[Any]:
    table = TensorDataset(torch.arange(samples))
    drops = arguments.pop("drops", False)
    sampler = DistributedSampler(table, workers, rank, seed=3, drop_last=drops, **arguments)
    return DataLoader(table, batch_size, sampler=sampler, drop_last=drops)


def loader_of(theirs: DataLoader[Any], workers: int) -> ScriptLoader:
    return ScriptLoader(theirs, listed(theirs, workers, lambda _: nullcontext()))


def trained(loader: ScriptLoader) -> Iterator[list[int]]:
    """The samples of each batch of the epoch, as if every step was applied."""
    loader.begin_epoch()
    for (x,) in loader:
        assert loader.batch is not None
        yield x.tolist() if not loader.batch.is_dummy else []
        if loader.batch.is_last:
            step.mark_reduced()
            step.decide()
            loader.commit(loader.batch.global_batch)
    step.close()


def begin_next_epoch(loader: ScriptLoader, workers: int, number: int) -> None:
    loader.theirs.sampler.set_epoch(number)  # type: ignore[attr-defined]
    loader.expect(loader.theirs, listed(loader.theirs, workers, lambda _: nullcontext()))
    loader.end_epoch()
    loader.advance()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.booleans())
def test_each_worker_of_the_start_gets_the_batches_of_torch(
    workers: int, batch_size: int, times: int, shuffle: bool, drops: bool
) -> None:
    samples = workers * batch_size * times + 1  # one more than the workers can share equally
    for rank in range(workers):
        theirs = make(samples, batch_size, rank, workers, shuffle=shuffle, drops=drops)
        loader = loader_of(make(samples, batch_size, rank, workers, shuffle=shuffle, drops=drops), workers)
        loader.set_world(rank, workers)
        for epoch in range(2):
            theirs.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            if epoch:
                begin_next_epoch(loader, workers, epoch)
            assert list(trained(loader)) == [x.tolist() for (x,) in theirs]
        assert len(loader) == len(theirs)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_with_any_number_of_workers_each_sample_is_in_one_batch(
    workers: int, now: int, batch_size: int, samples: int
) -> None:
    loaders = [loader_of(make(samples, batch_size, 0, workers), workers) for _ in range(now)]
    for rank, loader in enumerate(loaders):
        loader.set_world(rank, now)
    several = [list(trained(loader)) for loader in loaders]
    repeats = loaders[0].listed.repeated().tolist()
    assert len(repeats) == -samples % workers  # torch repeats them, to give all workers equally many
    expected = sorted([*range(samples), *repeats])
    assert sorted(sample for each in several for batch in each for sample in batch) == expected


def test_several_batches_for_a_step_are_those_of_torch() -> None:
    for samples in (48, 41):  # at the end of 41 samples are three batches for a step, and the last one is shorter
        theirs = make(samples, 4, 1, 2)
        loader = loader_of(make(samples, 4, 1, 2), 2)
        loader.set_world(1, 2)
        loader.set_batches_of_step(4)
        assert list(trained(loader)) == [x.tolist() for (x,) in theirs]


def test_the_newest_number_of_batches_of_a_step_is_loaded_with_a_position() -> None:
    loader = loader_of(make(48, 4, 0, 2), 2)
    before = loader.state_dict()
    loader.set_batches_of_step(3)
    loader.load_state_dict(before)
    assert loader.batches_of_step == 3
    other = loader_of(make(48, 4, 0, 2), 2)
    other.load_state_dict(loader.state_dict())
    assert other.batches_of_step == 3


def test_a_batch_without_effect_leaves_the_position_and_the_batches() -> None:
    loader = loader_of(make(48, 4, 0, 2), 2)
    loader._cursor = 16
    before, batches = loader.state_dict(), loader.listed.digest
    theirs = make(48, 4, 0, 2)
    theirs.sampler.set_epoch(7)  # type: ignore[attr-defined]
    loader.expect(theirs, listed(theirs, 2, lambda _: nullcontext()))
    world.enter(world.World(GenerationId(1, 1, 0, "test"), Placement(0, 1, 0, 1, 0, 1), AloneTransport()))
    try:
        loader.rehearse()
        assert step.is_aborted()
        loader.end_rehearsal()
    finally:
        world.enter(None)
    assert loader.state_dict() | {"number": 0} == before
    assert loader.listed.digest == batches
    assert step.batch() is None


def test_no_worker_has_a_part_of_one_sample_where_the_script_has_no_such_batch() -> None:
    """BatchNorm refuses it: 3 workers have 2 + 2 + 0 samples of a last global batch of 4, and not 1 + 1 + 2."""
    for workers, now, samples in ((2, 3, 12), (4, 3, 24), (2, 4, 12)):
        sizes: list[int] = []
        for rank in range(now):
            loader = loader_of(make(samples, 4, 0, workers), workers)
            loader.set_world(rank, now)
            sizes += map(len, trained(loader))
        assert 1 not in sizes
        assert sum(sizes) == samples


def test_a_new_data_loader_takes_the_place_of_the_last_one() -> None:
    loader = loader_of(make(16, 4, 0, 2), 2)
    loader.set_world(0, 2)
    list(trained(loader))
    theirs = make(20, 4, 0, 2)
    loader.expect(theirs, listed(theirs, 2, lambda _: nullcontext()))
    loader.end_epoch()
    loader.advance()
    assert list(trained(loader)) == [x.tolist() for (x,) in make(20, 4, 0, 2)]


def test_what_the_script_replaces_between_epochs_counts_from_the_next_one_on() -> None:
    theirs = make(8, 4, 0, 1, shuffle=False)
    loader = loader_of(theirs, 1)
    loader.set_world(0, 1)
    seen = []
    for epoch in range(3):
        theirs.dataset.tensors = (torch.full((8,), epoch),)  # type: ignore[attr-defined]
        if epoch == 2:
            theirs.collate_fn = lambda items: (torch.stack([x for (x,) in items]) + 10,)
        if epoch:
            begin_next_epoch(loader, 1, epoch)
        seen += [value for batch in trained(loader) for value in batch]
    assert seen == [0] * 8 + [1] * 8 + [12] * 8
