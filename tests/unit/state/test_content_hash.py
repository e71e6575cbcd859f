"""Workers compare the samples of streams by hashes of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from farandole.errors import CollectiveMismatch
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step
from farandole.training.state.content_hash import content_hash
from tests.support.thread_workers import run_workers

VALUES: list[Any] = [
    None,
    0,
    1,
    True,
    1.0,
    "1",
    b"1",
    b"2",
    (1, 2),
    [1, 2],
    [[1], 2],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"__key__": "1"},
    torch.zeros(2),
    torch.zeros(1, 2),
    torch.zeros(2, dtype=torch.int32),
    torch.zeros(2, dtype=torch.bfloat16),
    torch.ones(()),
    torch.arange(6).view(2, 3),
    torch.arange(6).view(2, 3).t(),
    np.zeros(2),
    np.float32(0),
    object(),
]


def test_values_that_differ_have_other_hashes_and_equal_ones_the_same() -> None:
    assert len({content_hash([value]) for value in VALUES}) == len(VALUES)
    for value in VALUES:
        assert 0 <= content_hash([value]) == content_hash([value]) < 2**63
    assert content_hash([1], 2) != content_hash([1], 3)


def test_paths_of_a_host_do_not_count() -> None:
    assert content_hash([{"__url__": "/tmp/a.tar", "x": 1}]) == content_hash([{"__url__": "/tmp/b.tar", "x": 1}])


def test_of_an_object_without_values_its_type_counts() -> None:
    assert content_hash([object()]) == content_hash([object()])
    assert content_hash([np.array([object()])]) == content_hash([np.array([object()])])


def train(rank: int, samples: Callable[[int], list[float]], **options: Any) -> list[float]:
    """Train one epoch of a stream, of which this rank reads `samples(rank)`. Returns the samples of this rank."""

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.tensor([value]) for value in samples(rank)])

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = StreamLoader(Stream(), 4, **options)
    loader.set_world(rank, 2)
    step.on_decided(lambda batch: loader.commit(batch.global_batch))  # type: ignore[union-attr]
    seen: list[float] = []
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        seen += x.flatten().tolist() if loader.indices else []
    return seen


NUMBERS = [float(number) for number in range(20)]


def test_workers_that_read_the_same_stream_train_all_of_it() -> None:
    for options in ({}, {"max_local_batch": 1}, {"streams": 2}):
        by_rank = run_workers(2, lambda rank: train(rank, lambda _: NUMBERS, **options))  # noqa: B023
        assert sorted(by_rank[0] + by_rank[1]) == NUMBERS


@pytest.mark.parametrize(
    "samples",
    [
        lambda rank: NUMBERS[rank::2],
        lambda rank: NUMBERS[rank:] + NUMBERS[:rank],
        lambda rank: NUMBERS[: 20 - rank],
        lambda rank: [*NUMBERS[:4], *(number + rank for number in NUMBERS[4:])],
    ],
    ids=["divided", "shuffled", "shorter", "other later ones"],
)
def test_workers_that_read_other_samples_are_told_so(samples: Callable[[int], list[float]]) -> None:
    with pytest.raises(CollectiveMismatch, match=r"yields other samples to ranks \[0\], others to ranks \[1\]"):
        run_workers(2, lambda rank: train(rank, samples))


def test_what_differs_by_nature_is_compared_by_its_key() -> None:
    by_rank = run_workers(
        2,
        lambda rank: train(
            rank, lambda rank: [number + rank / 4 for number in NUMBERS], sample_key=lambda sample: int(sample)
        ),
    )
    assert sorted(int(each) for part in by_rank for each in part) == NUMBERS
