"""What loops over torch's DataLoaders read: undivided data has the same hash on all workers, divided data has not."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import farandole as fd
from farandole.errors import ConfigError
from farandole.training.state.undivided_data import UndividedData

SAMPLES = torch.arange(24.0).reshape(12, 2)


class Files(Dataset[Any]):
    """As people write them: paths, a transform, a table."""

    def __init__(self, names: list[str]) -> None:
        self.root, self.names, self.kinds = Path("/data"), names, {"cat": 0, "dog": 1}
        self.transform: Any = functools.partial(torch.add, 1)
        self.crop = torch.nn.Sequential(torch.nn.Flatten())
        self.seen, self.limits, self.dtype, self.of = {1, 2}, range(3), torch.float32, np.zeros(3)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is read")


class Opened(Files):
    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.file = io.BytesIO()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


NAMES = [f"{number}.png" for number in range(12)]
DATA: dict[str, Callable[[slice], Any]] = {
    "tensors": lambda part: TensorDataset(SAMPLES[part]),
    "a list": lambda part: SAMPLES[part].tolist(),
    "files": lambda part: Files(NAMES[part]),
    "a subset": lambda part: Subset(TensorDataset(SAMPLES), range(12)[part]),
    "several": lambda part: ConcatDataset([Files(NAMES[:3]), Files(NAMES[part])]),
}


def read_by(*loaders: Any) -> UndividedData:
    """What loops over these read. Other tests of this process may have left some of theirs."""
    return UndividedData([iter(loader) for loader in loaders])


@pytest.mark.parametrize("name", DATA)
def test_the_same_data_has_the_same_hash_and_another_part_of_it_another_one(name: str) -> None:
    make = DATA[name]
    first, second = (read_by(DataLoader(make(slice(None)), batch_size=2, shuffle=True)) for _ in range(2))
    other = read_by(DataLoader(make(slice(0, None, 2)), batch_size=2, shuffle=True))
    assert first.hash == second.hash
    assert 0 < first.hash < 1 << 50
    assert other.hash not in (0, first.hash)
    assert "RandomSampler" in first.text()
    assert f"all {first.samples} samples" in first.text()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(SAMPLES), sampler=DistributedSampler(TensorDataset(SAMPLES), 2, 0)),
        DataLoader(TensorDataset(SAMPLES), sampler=list(range(0, 12, 2))),
        DataLoader(Stream(), batch_size=2),
        DataLoader(Opened(NAMES), batch_size=2),
    ],
    ids=["divided", "own order", "stream", "an open file"],
)
def test_data_that_is_divided_or_cannot_be_compared_is_not_spoken_of(loader: Any) -> None:
    assert not read_by(loader)


def test_data_that_no_loop_reads_is_not_spoken_of() -> None:
    assert not read_by()


def test_a_loop_over_divided_data_beside_another_one_is_not_spoken_of() -> None:
    beside = DataLoader(TensorDataset(SAMPLES), sampler=DistributedSampler(TensorDataset(SAMPLES), 2, 0))
    assert not read_by(DataLoader(TensorDataset(SAMPLES), batch_size=2), beside)


@pytest.mark.parametrize("sampler", [RandomSampler(range(12)), WeightedRandomSampler([1.0] * 12, 12)])
def test_each_sampler_that_draws_from_all_data_is_named(sampler: Any) -> None:
    assert type(sampler).__name__ in read_by(DataLoader(TensorDataset(SAMPLES), sampler=sampler)).text()


@pytest.mark.parametrize("loader", [fd.elastic.DataLoader, fd.elastic.StreamLoader])
def test_a_batch_size_of_torch_says_what_is_to_be_given_instead(loader: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=50 is not supported: .* give global_batch_size"):
        loader(TensorDataset(SAMPLES), batch_size=50)
