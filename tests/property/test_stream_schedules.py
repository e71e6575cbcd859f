"""Whatever the workers do, StreamLoader hands out each sample of each stream once per epoch, in the same batches."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from farandole.training.data.prefetch import Prefetch
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step

no_deadline = settings(deadline=None)
lengths = st.lists(st.integers(0, 12), min_size=1, max_size=5)


class Shards:
    """Stream v gives v, v + V, v + 2V, ...: as many as its length says."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def stream(self, stream: int, streams: int) -> Iterator[int]:
        return (stream + streams * number for number in range(self.lengths[stream]))

    def everything(self) -> list[int]:
        return sorted(v + len(self.lengths) * n for v, length in enumerate(self.lengths) for n in range(length))


class Sized(Shards):
    def stream_length(self, stream: int, streams: int) -> int:
        return self.lengths[stream]


class Positions(Iterator[int]):
    """An iterator that says where it is, and begins anew once it has ended."""

    def __init__(self, stream: int, streams: int, length: int) -> None:
        self.stream, self.streams, self.length, self.number = stream, streams, length, 0

    def __next__(self) -> int:
        if self.number == self.length:
            self.number = 0
            raise StopIteration
        self.number += 1
        return self.stream + self.streams * (self.number - 1)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class WithState(Shards):
    def stream(self, stream: int, streams: int) -> Iterator[int]:
        return Positions(stream, streams, self.lengths[stream])


class SizedWithState(Sized, WithState):
    pass


class ReadAhead:
    """As torch's DataLoader with this many processes, but without processes: batches are made as soon as possible."""

    generator = None

    def __init__(self, loader: StreamLoader, processes: int, ahead: int) -> None:
        self.requests, self.ahead = loader._requests, ahead
        self.readers = [pickle.loads(pickle.dumps(loader._reader)) for _ in range(processes)]

    def __iter__(self) -> Iterator[Any]:
        made: deque[Any] = deque()
        for asked, request in enumerate(self.requests):
            made.append(self.readers[asked % len(self.readers)][pickle.loads(pickle.dumps(request))])
            if len(made) > self.ahead:
                yield pickle.loads(pickle.dumps(made.popleft()))


@pytest.fixture(autouse=True)
def _no_open_step() -> Iterator[None]:
    step.close()
    yield
    step.close()


def make(dataset: Any, size: int, processes: int = 0, ahead: int = 0, **options: Any) -> StreamLoader:
    stateful = isinstance(dataset, WithState)
    loader = StreamLoader(dataset, size, streams=len(dataset.lengths), collate_fn=list, stateful=stateful, **options)
    if processes:
        inner: Any = ReadAhead(loader, processes, ahead)
        loader._prefetch = Prefetch(inner, loader._requests, keeps_processes=True)
    return loader


def place_of(loader: StreamLoader) -> dict[str, Any]:
    """Without what each worker knows for itself: with known lengths, it has read streams of its own only."""
    state = loader.state_dict()
    return state if type(loader.dataset) is not SizedWithState else {**state, "marks": None}


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
            if step.is_rehearsal():  # behind the last batch, where workers have regrouped
                step.close()
                continue
            if not loader.batch.is_dummy:
                assert data == loader.indices
                samples += data
            if loader.batch.is_last:
                break
        if loader.global_batch is not None and decided:
            loader.commit(loader.global_batch)
        step.close()
        shares.append(samples)
    assert ends in (0, len(loaders)), "a rank makes more steps than another"
    return None if ends else [sample for samples in shares for sample in samples]


@no_deadline
@given(
    lengths,
    st.integers(1, 9),
    st.sampled_from([Shards, Sized, WithState, SizedWithState]),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(0, 6)),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6),
)
def test_each_sample_is_trained_once_in_the_same_batches_under_any_schedule(
    lengths: list[int],
    size: int,
    kind: type[Shards],
    parts: tuple[int, int],
    reading: tuple[int, int],
    schedule: list[tuple[int, int, bool]],
) -> None:
    """`parts`: min_local_batch and max_local_batch; `reading`: loader workers, and batches that they are ahead."""
    options: dict[str, Any] = dict(zip(("processes", "ahead"), reading, strict=True))
    options["min_local_batch"] = least = min(parts[0], size)
    options["max_local_batch"] = max(parts[1], 2 * least - 1)
    alone, undisturbed = [make(kind(lengths), size)], []
    while (batch := batch_of(alone, decided=True)) is not None:
        undisturbed.append(batch)
    assert sorted(chain(*undisturbed)) == kind(lengths).everything()
    loaders = [make(kind(lengths), size, **options)]
    trained: list[list[int]] = []
    for ranks, steps, dies_in_step in [*schedule, (3, 100, False)]:
        state = loaders[-1].state_dict()
        newcomers = [make(kind(lengths), size, **options) for _ in range(ranks - len(loaders))]
        loaders = [*newcomers, *loaders][:ranks]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(state)
            loader.set_world(rank, ranks)
        for _ in range(steps):
            batch = batch_of(loaders, decided=True)
            if batch is None:
                break
            trained.append(batch)
            assert all(place_of(loader) == place_of(loaders[0]) for loader in loaders)
        if dies_in_step and not loaders[0].record.is_through:
            before = loaders[0].state_dict()
            batch_of(loaders, decided=False)
            assert loaders[0].state_dict() == before, "handing out has changed the state"
    assert trained == undisturbed
