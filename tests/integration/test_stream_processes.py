"""StreamLoader with real loader workers: they live on when the world changes, and the order stays as it is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import get_worker_info

from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step

pytestmark = pytest.mark.timeout(60)

SAMPLES, STREAMS = 400, 4


class Numbers:
    """Stream v has v, v + V, ...; one that divides itself among loader workers would lose some here."""

    def __init__(self, damaged: int = -1) -> None:
        self.damaged = damaged

    def stream(self, stream: int, streams: int) -> Iterator[int]:
        info = get_worker_info()
        own, processes = (info.id, info.num_workers) if info is not None else (0, 1)
        for place, number in enumerate(range(stream, SAMPLES, streams)):
            if number == self.damaged:
                raise KeyError(f"sample {number} is damaged")
            if place % processes == own:
                yield number


class Slow(Iterator[int]):
    """A stream that says where it is, and takes its time for each sample."""

    def __init__(self, stream: int, streams: int) -> None:
        self.stream, self.streams, self.number = stream, streams, 0

    def __next__(self) -> int:
        sample = self.stream + self.streams * self.number
        if sample >= SAMPLES:
            raise StopIteration
        self.number += 1
        time.sleep(0.001)
        return sample

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class SlowStreams:
    def stream(self, stream: int, streams: int) -> Slow:
        return Slow(stream, streams)


def with_process(number: int) -> tuple[int, int]:
    return number, os.getpid()


@pytest.fixture(autouse=True)
def no_open_step() -> Iterator[None]:
    step.close()
    yield
    step.close()


@pytest.fixture
def loaders() -> Iterator[Any]:
    """Makes loaders, and closes them at the end."""
    made: list[StreamLoader] = []

    def make(dataset: Any = None, **options: Any) -> StreamLoader:
        defaults: dict[str, Any] = {"streams": STREAMS, "num_workers": 2, "collate_fn": list, "transform": with_process}
        made.append(StreamLoader(dataset or Numbers(), 10, **{**defaults, **options}))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def take(feed: Iterator[Any], loader: StreamLoader, steps: int) -> tuple[list[int], set[int]]:
    """Train on the next `steps` batches: their samples, and the processes that transformed them."""
    samples, processes = [], set()
    for _, data in zip(range(steps), feed, strict=False):
        assert [number for number, _ in data] == loader.indices
        for number, process in data:
            samples.append(number)
            processes.add(process)
        assert loader.global_batch is not None
        loader.commit(loader.global_batch)
        step.close()
    return samples, processes


def test_the_same_processes_go_on_over_epochs_and_changes_of_the_world_in_the_same_order(loaders: Any) -> None:
    alone = loaders(num_workers=0)
    expected, here = take(iter(alone), alone, 100)
    assert here == {os.getpid()}
    assert sorted(expected) == list(range(SAMPLES))
    loader = loaders(persistent_workers=True)
    epochs = loader.epochs(2)
    assert next(epochs) == 0
    samples, before = take(iter(loader), loader, 5)
    assert samples == expected[:50]
    loader.set_world(1, 2)
    samples, after = take(iter(loader), loader, 2)
    assert samples == expected[55:60] + expected[65:70]
    loader.set_world(0, 1)
    assert take(iter(loader), loader, 100)[0] == expected[70:]
    assert next(epochs) == 1
    samples, later = take(iter(loader), loader, 100)
    assert samples == expected
    assert before == after == later
    assert len(before) == 2
    assert os.getpid() not in before


def test_a_batch_without_a_decided_step_comes_again_from_the_same_processes(loaders: Any) -> None:
    loader = loaders(persistent_workers=True)
    _, before = take(iter(loader), loader, 3)
    out = next(iter(loader))
    state = loader.state_dict()
    again = next(iter(loader))
    assert [number for number, _ in again] == [number for number, _ in out]
    assert {process for _, process in again} <= before
    assert loader.state_dict() == state


def test_an_error_in_a_loader_worker_shows_where_it_was_raised_and_only_when_its_batch_is_due(loaders: Any) -> None:
    loader = loaders(Numbers(damaged=44), seed=1)
    take(iter(loader), loader, 3)
    state = loader.state_dict()
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    assert "sample 44 is damaged" in str(caught.value)
    assert "in stream" in str(caught.value)
    assert loader.cursor == 30
    assert loader.state_dict() == state
    mended = loaders(seed=1)
    mended.load_state_dict(state)
    assert 44 in take(iter(mended), mended, 1)[0]


def test_after_a_killed_loader_process_the_next_batch_comes_from_new_ones(loaders: Any) -> None:
    loader, alone = loaders(), loaders(num_workers=0)
    feed = iter(loader)
    samples, before = take(feed, loader, 4)
    for process in before:
        os.kill(process, signal.SIGKILL)
    more, after = take(feed, loader, 36)
    assert samples + more == take(iter(alone), alone, 40)[0]
    assert not before & after


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_processes_that_are_started_in_mid_epoch_open_stateful_streams_where_they_were(
    loaders: Any, context: str
) -> None:
    options = {"dataset": SlowStreams(), "stateful": True, "micro_batch_size": 4}
    old = loaders(**options)
    take_all = take_in_parts(old, 24)
    state = old.state_dict()
    assert [mark[1] for mark in state["marks"]] == [{"number": offset} for offset in state["offsets"]]
    new = loaders(**options, multiprocessing_context=context, num_workers=1)
    new.load_state_dict(state)
    assert sorted(take_all + take_in_parts(new, 100)) == list(range(SAMPLES))


def take_in_parts(loader: StreamLoader, steps: int) -> list[int]:
    samples: list[int] = []
    for data in loader:
        samples += [number for number, _ in data]
        assert loader.batch is not None
        if loader.batch.is_last:
            loader.commit(loader.batch.global_batch)
            step.close()
            steps -= 1
            if not steps:
                break
    return samples
