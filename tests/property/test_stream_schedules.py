"""Whatever the workers do, StreamLoader hands out each sample of each stream once per epoch, in the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data.stream_loader import StreamLoader
from farandole.state import step

no_deadline = settings(deadline=None)
lengths = st.lists(st.integers(0, 12), min_size=1, max_size=5)


class Shards:
    """Stream v gives v, v + V, v + 2V, ...: as many as its length says."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.opened = 0

    def stream(self, stream: int, streams: int) -> Iterator[int]:
        self.opened += 1
        return (stream + streams * number for number in range(self.lengths[stream]))

    def everything(self) -> list[int]:
        return sorted(v + len(self.lengths) * n for v, length in enumerate(self.lengths) for n in range(length))


class Sized(Shards):
    def stream_length(self, stream: int, streams: int) -> int:
        return self.lengths[stream]


@pytest.fixture(autouse=True)
def _no_open_step() -> Iterator[None]:
    step.close()
    yield
    step.close()


def make(dataset: Any, size: int, **options: Any) -> StreamLoader:
    return StreamLoader(dataset, size, streams=len(dataset.lengths), collate_fn=list, **options)


def batch_of(loaders: list[StreamLoader], decided: bool) -> list[int] | None:
    """One global batch over all ranks, in order; None at the end of the epoch. Undecided, it comes again."""
    shares: list[list[int]] = []
    ends = 0
    for loader in loaders:
        samples: list[int] = []
        iterator = iter(loader)
        while True:
            data = next(iterator, None)
            if data is None:
                ends += 1
                break
            assert loader.batch is not None
            assert data, "an empty batch"
            if not loader.batch.is_ghost:
                assert data == loader.indices
                samples += data
            if loader.batch.is_last:
                break
        if loader.ticket is not None and decided:
            loader.commit(loader.ticket)
        step.close()
        shares.append(samples)
    assert ends in (0, len(loaders)), "a rank makes more steps than another"
    return None if ends else [sample for samples in shares for sample in samples]


@no_deadline
@given(
    lengths,
    st.integers(1, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 4)),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6),
)
def test_each_sample_is_trained_once_in_the_same_batches_under_any_schedule(
    lengths: list[int], size: int, sized: bool, most: int | None, schedule: list[tuple[int, int, bool]]
) -> None:
    kind = Sized if sized else Shards
    alone, undisturbed = [make(kind(lengths), size)], []
    while (batch := batch_of(alone, decided=True)) is not None:
        undisturbed.append(batch)
    assert sorted(chain(*undisturbed)) == kind(lengths).everything()
    loaders = [make(kind(lengths), size, max_local_batch=most)]
    trained: list[list[int]] = []
    for ranks, steps, dies_in_step in [*schedule, (3, 100, False)]:
        state = loaders[-1].state_dict()
        newcomers = [make(kind(lengths), size, max_local_batch=most) for _ in range(ranks - len(loaders))]
        loaders = [*newcomers, *loaders][:ranks]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(state)
            loader.set_world(rank, ranks)
        for _ in range(steps):
            batch = batch_of(loaders, decided=True)
            if batch is None:
                break
            trained.append(batch)
            assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
        if dies_in_step:
            before = loaders[0].state_dict()
            batch_of(loaders, decided=False)
            assert loaders[0].state_dict() == before, "handing out has changed the state"
    assert trained == undisturbed
