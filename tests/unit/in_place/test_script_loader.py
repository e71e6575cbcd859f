"""A script's DataLoader as a loader of Farandole: with the workers of the start, each gets torch's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from farandole.collectives import world
from farandole.collectives.alone import AloneTransport
from farandole.errors import ConfigError, DataError
from farandole.in_place.script_loader import NUMBERED, ScriptLoader, refuse_unsuitable
from farandole.membership import GenerationId, Placement
from farandole.state import step


def make(samples: int, batch_size: int, rank: int, workers: int, **arguments: Any) -> DataLoader[Any]:
    table = TensorDataset(torch.arange(samples))
    drops = arguments.pop("drops", False)
    sampler = DistributedSampler(table, workers, rank, seed=3, drop_last=drops, **arguments)
    return DataLoader(table, batch_size, sampler=sampler, drop_last=drops)


def taken(loader: ScriptLoader, epochs: int) -> Iterator[list[int]]:
    """The samples of each batch, as if every step was applied."""
    for epoch in range(epochs):
        loader._sampler.set_epoch(epoch)
        setattr(loader._sampler, NUMBERED, True)
        if epoch:
            loader.end_epoch()
            loader.advance()
        loader.begin_epoch()
        for (x,) in loader:
            assert loader.batch is not None
            yield x.tolist() if not loader.batch.is_dummy else []
            step.mark_reduced()
            step.decide()
            loader.commit(loader.batch.global_batch)
    step.close()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.booleans())
def test_each_worker_of_the_start_gets_the_batches_of_torch(
    workers: int, batch_size: int, times: int, shuffle: bool, drops: bool
) -> None:
    samples = workers * (batch_size * times + 1)  # a last batch of one sample
    for rank in range(workers):
        theirs = make(samples, batch_size, rank, workers, shuffle=shuffle, drops=drops)
        loader = ScriptLoader(make(samples, batch_size, rank, workers, shuffle=shuffle, drops=drops), workers)
        loader.set_world(rank, workers)
        expected = []
        for epoch in range(2):
            theirs.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            expected += [x.tolist() for (x,) in theirs]
        assert list(taken(loader, epochs=2)) == expected
        assert len(loader) == len(theirs)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_with_any_number_of_workers_each_sample_is_in_one_batch(
    workers: int, now: int, batch_size: int, samples: int
) -> None:
    loaders = [ScriptLoader(make(samples, batch_size, 0, workers), workers) for _ in range(now)]
    for rank, loader in enumerate(loaders):
        loader.set_world(rank, now)
    several = [list(taken(loader, epochs=1)) for loader in loaders]
    assert sorted(sample for each in several for batch in each for sample in batch) == list(range(samples))


def test_several_batches_for_a_step_are_those_of_torch() -> None:
    theirs = make(48, 4, 1, 2)
    loader = ScriptLoader(make(48, 4, 1, 2), 2)
    loader.set_world(1, 2)
    loader.set_batches_of_step(3)
    loader.begin_epoch()
    ours = []
    for (x,) in loader:
        ours.append(x.tolist())
        assert loader.batch is not None
        if loader.batch.is_last:
            step.mark_reduced()
            step.decide()
            loader.commit(loader.batch.global_batch)
    step.close()
    assert ours == [x.tolist() for (x,) in theirs]


def test_a_position_that_was_saved_before_the_batches_of_a_step_were_known_can_be_loaded() -> None:
    loader = ScriptLoader(make(48, 4, 0, 2), 2)
    before = loader.state_dict()
    loader.set_batches_of_step(3)
    loader.load_state_dict(before)
    assert loader.batches_of_step == 3
    other = ScriptLoader(make(48, 4, 0, 2), 2)
    other.load_state_dict(loader.state_dict())
    assert other.batches_of_step == 3


def test_a_batch_without_effect_leaves_the_position() -> None:
    loader = ScriptLoader(make(48, 4, 0, 2), 2)
    loader._cursor = 16
    before = loader.state_dict()
    world.enter(world.World(GenerationId(1, 1, 0, "test"), Placement(0, 1, 0, 1, 0, 1), AloneTransport()))
    try:
        loader.rehearse()
        assert step.is_aborted()
        loader.end_rehearsal()
    finally:
        world.enter(None)
    assert loader.state_dict() == before
    assert step.batch() is None


class Reversed(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([*super().__iter__()][::-1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def unsuitable(kind: str) -> DataLoader[Any]:
    table = TensorDataset(torch.arange(8))
    if kind == "stream":
        return DataLoader(Stream(), batch_size=2)
    if kind == "sampler":
        return DataLoader(table, batch_size=2, sampler=Reversed(table, 1, 0))
    if kind == "undivided":
        return DataLoader(table, batch_size=2, shuffle=True)
    sampler = DistributedSampler(table, 1, 0)
    if kind == "no batches":
        return DataLoader(table, batch_size=None, sampler=sampler)
    return DataLoader(table, batch_sampler=type("Own", (BatchSampler,), {})(sampler, 2, False))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stream", "an IterableDataset"),
        ("sampler", "Reversed has an order of its own"),
        ("undivided", "has a RandomSampler"),
        ("no batches", "batches of its own"),
        ("batch sampler", "no DistributedSampler"),
    ],
)
def test_a_loader_that_cannot_be_divided_anew_is_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        refuse_unsuitable(unsuitable(kind))


def test_a_sampler_for_another_data_set_is_refused() -> None:
    table = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(TensorDataset(torch.arange(9)), 1, 0)
    with pytest.raises(ConfigError, match="a data set of 9 samples"):
        ScriptLoader(DataLoader(table, batch_size=2, sampler=sampler), 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 40), st.booleans(), st.booleans(), st.data())
def test_the_rest_of_an_epoch_is_that_of_torch(
    workers: int, batch_size: int, samples: int, shuffle: bool, drops: bool, data: st.DataObject
) -> None:
    """With the workers of the start every rank goes on in torch's own list of samples."""
    samples += workers * batch_size
    loader = ScriptLoader(make(samples, batch_size, 0, workers, shuffle=shuffle, drops=drops), workers)
    loader.begin_epoch()
    batches = data.draw(st.integers(0, samples // (workers * batch_size)))
    for rank in range(workers):
        theirs = make(samples, batch_size, rank, workers, shuffle=shuffle, drops=drops)
        rest = loader.rest(batches * batch_size * workers, rank, workers)
        assert rest == [*theirs.sampler][batches * batch_size :]


@given(st.integers(1, 5), st.integers(1, 60))
def test_the_rest_of_an_epoch_is_divided_among_any_number_of_workers(workers: int, samples: int) -> None:
    loader = ScriptLoader(make(samples + 6, 2, 0, 3), 3)
    loader.begin_epoch()
    shares = [loader.rest(6, rank, workers) for rank in range(workers)]
    assert len({len(share) for share in shares}) == 1
    trained = {index for share in shares for index in share}
    expected = set(range(samples + 6)) - set([*_torchs_order(samples + 6)][:6])
    assert expected <= trained
    assert sum(map(len, shares)) - len(expected) < workers


def _torchs_order(samples: int) -> list[int]:
    return [*make(samples, 1, 0, 1).sampler]


def test_what_the_script_replaces_between_epochs_counts_from_the_next_one_on() -> None:
    theirs = make(8, 4, 0, 1, shuffle=False)
    loader = ScriptLoader(theirs, 1)
    loader.set_world(0, 1)
    seen = []
    for epoch in range(3):
        theirs.dataset.tensors = (torch.full((8,), epoch),)  # type: ignore[attr-defined]
        if epoch == 2:
            theirs.collate_fn = lambda items: (torch.stack([x for (x,) in items]) + 10,)
        if epoch:
            loader.end_epoch()
            loader.advance()
        loader.begin_epoch()
        for (x,) in loader:
            seen += x.tolist()
            loader.commit(loader.batch.global_batch)  # type: ignore[union-attr]
            step.close()
    assert seen == [0] * 8 + [1] * 8 + [12] * 8


def test_a_data_set_of_another_length_is_refused_in_the_next_epoch() -> None:
    theirs = make(8, 4, 0, 1)
    loader = ScriptLoader(theirs, 1)
    theirs.dataset.tensors = (torch.arange(9),)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="has 9 samples now, and had 8"):
        iter(loader)
