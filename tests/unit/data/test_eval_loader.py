"""Evaluation: each sample once over all workers, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import IterableDataset

from farandole.base.membership import GenerationId, Placement
from farandole.errors import DataError, NotInitialized, StepError
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.data.eval_loader import EvalLoader

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def no_world() -> Iterator[None]:
    yield
    world.enter(None)


def enter(rank: int = 0, size: int = 1, generation: int = 1) -> None:
    identity = GenerationId(1, 1, generation, "")
    world.enter(world.World(identity, Placement(rank, size, rank, size, 0, 1), AloneTransport(generation)))


@settings(deadline=None)
@given(size=st.integers(0, 60), batch_size=st.integers(1, 20), workers=st.integers(1, 9))
def test_each_sample_is_handed_out_once_and_the_weighted_mean_is_exact(
    size: int, batch_size: int, workers: int
) -> None:
    loader = EvalLoader(range(size), batch_size, collate_fn=list)
    seen: list[int] = []
    total = weight = 0.0
    for rank in range(workers):
        enter(rank, workers)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(1 <= len(batch) <= batch_size for batch in batches)
        mine = [sample for batch in batches for sample in batch]
        assert len(mine) == loader.samples
        seen += mine
        total += loader.samples * (sum(mine) / max(1, loader.samples))  # as fd.mean
        weight += loader.samples
    assert seen == list(range(size))
    assert weight == size
    assert total == pytest.approx(sum(range(size)))


def test_each_iteration_begins_anew_among_the_workers_there_are_then() -> None:
    loader = EvalLoader(range(10), 3, collate_fn=list)
    enter(0, 2)
    assert next(iter(loader)) == [0, 1, 2]
    assert list(loader) == [[0, 1, 2], [3, 4]]
    enter(1, 3, generation=2)
    assert list(loader) == [[3, 4, 5]]


def test_workers_that_change_within_an_evaluation_are_noticed() -> None:
    loader = EvalLoader(range(10), 3, collate_fn=list)
    enter(0, 2)
    feed = iter(loader)
    next(feed)
    enter(0, 1, generation=2)
    with pytest.raises(StepError, match="the workers have changed within an evaluation"):
        next(feed)


def test_an_evaluation_takes_no_number_from_the_global_generator() -> None:
    enter()
    before = torch.get_rng_state()
    list(EvalLoader(range(10), 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_workers_serve_one_evaluation_after_the_other_also_an_abandoned_one() -> None:
    enter()
    loader = EvalLoader(range(10), 3, num_workers=1, collate_fn=list)
    try:
        assert next(iter(loader)) == [0, 1, 2]
        enter(1, 2, generation=2)
        assert list(loader) == [[5, 6, 7], [8, 9]]
    finally:
        loader.close()
        loader.close()
    assert list(loader) == [[5, 6, 7], [8, 9]]
    loader.close()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "batch_size", "message"),
    [(Stream(), 1, "is an IterableDataset"), (range(3), 0, "batch_size must be 1 or more, got 0")],
)
def test_what_cannot_be_divided_is_refused(dataset: Any, batch_size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        EvalLoader(dataset, batch_size)


def test_nobody_can_tell_which_samples_are_its_own_before_init() -> None:
    with pytest.raises(NotInitialized):
        next(iter(EvalLoader(range(3))))
