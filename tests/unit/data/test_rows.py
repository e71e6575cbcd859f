"""Batches of a TensorDataset are taken all at once, and are what torch makes of its items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader, Subset, TensorDataset

import farandole as fd
from farandole.training.data.fetching import Rows, are_rows

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


WHOLE = TensorDataset(
    torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(0)).transpose(1, 2),
    torch.arange(40),
    torch.arange(40).half().view(40, 1),
    torch.arange(40) % 2 == 0,
)
HALF = Subset(WHOLE, range(1, 40, 2))
QUARTER = Subset(HALF, [*range(0, 20, 2), -1])
LAST = Subset(WHOLE, range(-7, 0))
UNUSUAL = TensorDataset(WHOLE.tensors[0], torch.arange(40).to(torch.uint16))


@pytest.mark.parametrize("dataset", [WHOLE, HALF, QUARTER, LAST, UNUSUAL])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_they_are_those_of_torch(dataset: Any, num_workers: int) -> None:
    ours = fd.elastic.EvalLoader(dataset, 3, num_workers=num_workers)
    batches = list(zip(ours, TorchDataLoader(dataset, 3), strict=True))
    ours.close()
    for our, theirs in batches:
        assert type(our) is type(theirs)
        for mine, its in zip(our, theirs, strict=True):
            assert (mine.dtype, mine.stride()) == (its.dtype, its.stride())
            assert torch.equal(mine, its)


def test_a_training_batch_has_the_samples_that_it_says() -> None:
    loader = fd.elastic.DataLoader(WHOLE, 8)
    for _, numbers, _, _ in loader:
        assert numbers.tolist() == loader.indices
        loader.commit(loader.global_batch)


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * each for each in super().__getitem__(index))


def test_a_data_set_with_items_of_its_own_is_asked_for_them() -> None:
    dataset = Doubled(torch.arange(6))
    assert not are_rows(dataset)
    assert not are_rows(Subset(dataset, [1, 2]))
    (batch,) = fd.elastic.EvalLoader(dataset, 6)
    assert batch[0].tolist() == [0, 2, 4, 6, 8, 10]


def test_other_than_dense_tensors_are_left_to_torch() -> None:
    assert not are_rows(TensorDataset(torch.eye(4).to_sparse()))


def test_an_index_beyond_the_end_is_an_error() -> None:
    with pytest.raises(IndexError):
        Rows(WHOLE).__getitems__([39, 40])
