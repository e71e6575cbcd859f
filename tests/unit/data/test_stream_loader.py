"""StreamLoader: how streams are opened, what it refuses, what it leaves behind after an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from farandole.base.membership import Shortfall
from farandole.errors import ConfigError, DataError, StepError
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _no_open_step() -> Iterator[None]:
    step.close()
    yield
    step.close()


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Sharded:
    """As Hugging Face's data sets: shard(), skip(), set_epoch()."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.epoch, self.skipped = numbers, 0, []

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Sharded:
        shard = Sharded([100 * self.epoch + number for number in self.numbers[index::num_shards]])
        shard.skipped = self.skipped
        return shard

    def skip(self, count: int) -> Sharded:
        self.skipped.append(count)
        return Sharded(self.numbers[count:])


def train(loader: StreamLoader, most: int = 100) -> list[Any]:
    seen = []
    for _, data in zip(range(most), loader, strict=False):
        seen.append(data)
        assert loader.global_batch is not None
        loader.commit(loader.global_batch)
        step.close()
    return seen


def test_an_ordinary_iterable_data_set_is_read_in_one_stream_or_more() -> None:
    assert [batch.tolist() for batch in train(StreamLoader(Numbers(), 4))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    batches = train(StreamLoader(Numbers(), 4, streams=3, collate_fn=list))
    assert batches == [[0, 3, 1, 4], [2, 5, 6, 9], [7, 8]]


def test_each_epoch_is_opened_anew_with_its_number() -> None:
    loader = StreamLoader(Sharded([0, 1, 2, 3]), 4, streams=2, collate_fn=list)
    assert [(epoch, train(loader)) for epoch in loader.epochs(2)] == [(0, [[0, 2, 1, 3]]), (1, [[100, 102, 101, 103]])]


def test_a_newcomer_lets_the_data_set_skip_what_lies_before() -> None:
    old = StreamLoader(Sharded(list(range(12))), 4, streams=2, collate_fn=list)
    train(old, 2)
    dataset = Sharded(list(range(12)))
    new = StreamLoader(dataset, 4, streams=2, collate_fn=list)
    new.load_state_dict(old.state_dict())
    assert train(new) == train(old) == [[8, 10, 9, 11]]
    assert dataset.skipped == [4, 4]


def test_only_the_share_of_a_rank_is_transformed() -> None:
    transformed: list[int] = []

    def transform(sample: int) -> torch.Tensor:
        transformed.append(sample)
        return torch.tensor(sample)

    loader = StreamLoader(Numbers(), 5, transform=transform)
    loader.set_world(1, 2)
    train(loader)
    assert transformed == [2, 3, 4, 7, 8, 9]


def test_with_known_lengths_a_rank_opens_only_streams_of_its_share() -> None:
    opened = []

    class Sized:
        def stream(self, stream: int, streams: int) -> Iterator[int]:
            opened.append(stream)
            return iter(range(stream, 12, streams))

        def stream_length(self, stream: int, streams: int) -> int:
            return 12 // streams

    loader = StreamLoader(Sized(), 4, streams=4, collate_fn=list)
    loader.set_world(1, 2)
    assert train(loader) == [[2, 3], [6, 7], [10, 11]]
    assert opened == [2, 3]


def test_a_stream_that_is_shorter_than_it_says_is_an_error() -> None:
    class Liar:
        def stream(self, stream: int, streams: int) -> Iterator[int]:
            return iter([1])

        def stream_length(self, stream: int, streams: int) -> int:
            return 2

    with pytest.raises(DataError, match="ended after 1 samples"):
        next(iter(StreamLoader(Liar(), 2)))


def test_what_the_data_set_raises_comes_through_and_the_state_is_unharmed() -> None:
    is_broken = True

    class Broken:
        def __iter__(self) -> Iterator[int]:
            for number in range(6):
                if number == 5 and is_broken:
                    raise KeyError("sample five is damaged")
                yield number

    loader = StreamLoader(Broken(), 2, collate_fn=list)
    with pytest.raises(KeyError, match="sample five is damaged"):
        train(loader)
    assert (loader.epoch, loader.cursor) == (0, 4)
    is_broken = False
    assert train(loader) == [[4, 5]]


def test_a_batch_without_a_step_is_refused_and_one_commit_is_enough() -> None:
    loader = StreamLoader(Numbers(), 4)
    iterator = iter(loader)
    next(iterator)
    global_batch = loader.global_batch
    assert global_batch is not None
    with pytest.raises(StepError, match="no DistributedOptimizer has reduced gradients for samples"):
        next(iterator)
    loader.commit(global_batch)
    with pytest.raises(DataError, match="commit each global batch once"):
        loader.commit(global_batch)


def test_an_empty_data_set_ends_at_once() -> None:
    class Empty:
        def __iter__(self) -> Iterator[int]:
            return iter([])

    assert train(StreamLoader(Empty(), 2, streams=3)) == []


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(DataError, match="read only once"):
        StreamLoader(iter([1, 2]), 1)
    with pytest.raises(DataError, match="1 or more"):
        StreamLoader(Numbers(), 1, streams=0)
    with pytest.raises(DataError, match="min_local_batch"):
        StreamLoader(Numbers(), 1, min_local_batch=2)
    loader = StreamLoader(Numbers(), 2, streams=2)
    with pytest.raises(DataError, match="streams=3"):
        loader.load_state_dict(StreamLoader(Numbers(), 2, streams=3).state_dict())
    with pytest.raises(DataError, match="invalid position"):
        loader.load_state_dict({**loader.state_dict(), "offsets": [1]})


class Counting:
    """torchdata's protocol on the stream itself: where it is, and how many samples were read in all."""

    def __init__(self, length: int, read: list[int]) -> None:
        self.length, self.read, self.number = length, read, 0

    def __iter__(self) -> Iterator[int]:
        while self.number < self.length:
            self.read.append(self.number)
            self.number += 1
            yield self.number - 1
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Streams:
    """Opens as many streams as it is asked for, and keeps a record of what is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def stream(self, stream: int, streams: int) -> Counting:
        return Counting(self.length, self.read)


def test_a_stateful_stream_goes_on_where_it_was_without_reading_what_lies_before() -> None:
    old = StreamLoader(Streams(10), 4, streams=2, stateful=True, collate_fn=list)
    train(old, 3)
    dataset = Streams(10)
    new = StreamLoader(dataset, 4, streams=2, stateful=True, collate_fn=list)
    new.load_state_dict(old.state_dict())
    assert train(new) == train(old) == [[6, 7, 6, 7], [8, 9, 8, 9]]
    assert min(dataset.read) == 6


def test_a_stateful_data_set_is_one_stream_that_begins_anew_in_each_epoch() -> None:
    loader = StreamLoader(Counting(6, []), 4, stateful=True, collate_fn=list)
    for _ in loader.epochs(2):
        assert train(loader, 1) == [[0, 1, 2, 3]]  # and break
    read: list[int] = []
    train(loader, 1)
    new = StreamLoader(Counting(6, read), 4, stateful=True, collate_fn=list)
    new.load_state_dict(loader.state_dict())
    assert train(new) == [[4, 5]]
    assert read == [4, 5]
    assert [train(new) for _ in new.epochs(4)] == [[], [[0, 1, 2, 3], [4, 5]]]


def test_what_is_read_ahead_of_a_decided_step_is_not_in_the_state() -> None:
    loader = StreamLoader(Counting(6, []), 2, stateful=True, collate_fn=list)
    train(loader, 1)
    before = loader.state_dict()
    assert next(iter(loader)) == [2, 3]
    assert loader.state_dict() == before
    assert before["marks"] == [[2, {"number": 2}]]


def test_stateful_is_refused_where_there_is_no_state_of_a_stream() -> None:
    with pytest.raises(DataError, match="neither stream"):
        next(iter(StreamLoader(Numbers(), 2, stateful=True)))
    with pytest.raises(DataError, match="one of its 2 streams"):
        StreamLoader(Counting(6, []), 2, streams=2, stateful=True)


def test_random_numbers_of_transform_follow_from_the_position_and_not_from_who_trains_it() -> None:
    def draw(number: int) -> float:
        return float(torch.rand(1)) + number

    alone = StreamLoader(Numbers(), 5, seed=3, transform=draw, collate_fn=list)
    second = StreamLoader(Numbers(), 5, seed=3, transform=draw, collate_fn=list)
    second.set_world(1, 2)
    torch.manual_seed(7)
    whole, share = train(alone), train(second)
    assert [batch[2:] for batch in whole] == share
    assert len({number % 1 for batch in whole for number in batch}) == 10
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1)), "reading has used up random numbers of the step"


def test_micro_batches_of_one_global_batch_are_as_many_on_each_rank() -> None:
    loader = StreamLoader(Numbers(), 6, micro_batch_size=2, collate_fn=list)
    seen: list[tuple[list[int], int]] = []
    for data in loader:
        assert loader.batch is not None
        seen.append((data, loader.batch.index))
        if loader.batch.is_last:
            loader.commit(loader.batch.global_batch)
            step.close()
    assert seen == [([0, 1], 0), ([2, 3], 1), ([4, 5], 2), ([6, 7], 0), ([8, 9], 1)]
    with pytest.raises(DataError, match="give one"):
        StreamLoader(Numbers(), 6, micro_batch_size=2, max_local_batch=2)


def test_break_ends_an_epoch_for_good_also_in_a_state_that_is_loaded() -> None:
    loader = StreamLoader(Numbers(), 4, collate_fn=list)
    for epoch in loader.epochs(2):
        if epoch == 0:
            assert train(loader, 1) == [[0, 1, 2, 3]]
        else:
            assert train(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    epochs = loader.epochs(4)
    next(epochs)
    train(loader, 1)
    loader.hooks = Regroups(loader)
    assert next(epochs) == 2  # its tail again
    assert train(loader) == []
    assert next(epochs) == 3
    assert train(loader, 1) == [[0, 1, 2, 3]]


def test_a_second_pass_over_an_epoch_that_is_through_is_an_error_that_says_what_to_write() -> None:
    loader = StreamLoader(Numbers(), 4, collate_fn=list)
    assert train(loader, 1) == [[0, 1, 2, 3]]  # and break
    assert train(loader) == [[4, 5, 6, 7], [8, 9]]
    with pytest.raises(StepError, match=r"all batches of epoch 0 are trained.*for epoch in loader\.epochs\(5\)"):
        iter(loader)
    loader.set_world(0, 1)  # a regroup: the function is called again
    feed = iter(loader)
    assert next(feed) == [0, 1, 2, 3]  # the loop is not empty, and its step is aborted
    assert (step.status(), loader.cursor) == ("aborted", 10)
    assert next(feed, None) is None
    for epoch in loader.epochs(2):
        assert train(loader) == ([] if epoch == 0 else [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])


def test_epochs_that_ended_early_or_were_not_begun_are_counted() -> None:
    loader = StreamLoader(Numbers(), 4, collate_fn=list)
    for epoch in loader.epochs(4):
        train(loader, 1 if epoch == 1 else 100)
        if epoch == 2:
            break
    assert loader.shortfall() == Shortfall(4, 2, 0, 0)
    loader.load_state_dict(loader.state_dict())
    for _ in loader.epochs(4):
        train(loader)
    assert loader.shortfall() == Shortfall(4, 1, 0, 0)


def test_a_number_of_steps_ends_the_last_epoch_behind_the_last_of_them() -> None:
    loader, seen = StreamLoader(Numbers(), 4, collate_fn=list), []
    for epoch in loader.epochs(steps=5):
        seen.append((int(epoch), len(train(loader))))
        loader.load_state_dict(loader.state_dict())
    assert (seen, loader.shortfall()) == ([(0, 3), (1, 2)], None)


class Regroups(LoaderHooks):
    """A worker is lost in the tail of the epoch, once."""

    def __init__(self, loader: StreamLoader) -> None:
        self.loader, self.is_over = loader, False

    def reach_epoch_end(self) -> bool:
        self.loader.load_state_dict(self.loader.state_dict())
        is_over, self.is_over = self.is_over, True
        return is_over


def test_arguments_of_torchs_loader_that_cannot_be_followed_are_refused_with_the_reason() -> None:
    for name, value in {"batch_size": 2, "shuffle": True, "drop_last": True, "sampler": [1]}.items():
        with pytest.raises(ConfigError, match=f"StreamLoader: {name}="):
            StreamLoader(Numbers(), 2, **{name: value})
    with pytest.raises(TypeError, match="did you mean num_workers"):
        StreamLoader(Numbers(), 2, num_worker=2)


class Rehearses(LoaderHooks):
    """The first batch is a rehearsal's."""

    def __init__(self) -> None:
        self.is_due = True

    def rehearses(self) -> bool:
        is_due, self.is_due = self.is_due, False
        return is_due


def test_with_a_limit_the_rehearsal_splits_the_local_batch_as_a_loss_would() -> None:
    loader = StreamLoader(Sharded(list(range(24))), 8, streams=2, max_local_batch=4, collate_fn=list)
    loader.set_world(0, 2)
    loader.hooks = Rehearses()
    feed = iter(loader)
    rehearsed = [*next(feed), *next(feed)]
    assert (len(rehearsed), step.status()) == (4, "aborted")
    assert (next(feed), step.status()) == (rehearsed, "open")
