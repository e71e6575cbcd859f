"""What a sample's augmentation sees follows from its place in the epoch, not from who fetches it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from farandole.training.state import step

Item = tuple[int, float, float, float]


class Augmented(torch.utils.data.Dataset[Item]):
    name = "augmented"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Item:
        return index, torch.rand(()).item(), random.random(), float(np.random.rand())


def fetch(rank: int = 0, workers: int = 1, epochs: int = 1, dataset: Any = None, **arguments: Any) -> dict[Any, Item]:
    """What one rank is handed: by epoch and sample."""
    loader = fd.elastic.DataLoader(
        Augmented() if dataset is None else dataset, 10, seed=5, collate_fn=list, **arguments
    )
    loader.set_world(rank, workers)
    step.on_decided(lambda batch: loader.commit(batch.global_batch))
    seen = {}
    for epoch in loader.epochs(epochs):
        for items in loader:
            seen.update({(int(epoch), item[0]): item for item in items})
            if loader.batch.is_last:
                step.mark_reduced()
                step.decide()
    loader.close()
    step.on_decided(None)
    return seen


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_it_is_the_same_for_any_number_of_ranks_and_loader_workers(num_workers: int) -> None:
    whole = fetch()
    shares = [fetch(rank, 3, num_workers=num_workers, micro_batch_size=2) for rank in range(3)]
    assert {key: item for share in shares for key, item in share.items()} == whole
    assert len({item[1:] for item in whole.values()}) == 40


def test_it_is_another_one_in_each_epoch() -> None:
    seen = fetch(epochs=2)
    assert all(seen[0, sample][1:] != seen[1, sample][1:] for sample in range(40))


def test_fetching_in_the_training_process_leaves_its_generators_as_they_are() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    wanted = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    fetch()
    assert torch.equal(torch.rand(3), wanted[0])
    assert (random.random(), np.random.rand()) == wanted[1:]


def test_a_subset_is_seeded_item_by_item_too() -> None:
    subset = torch.utils.data.Subset(Augmented(), range(30))
    whole = fetch(dataset=subset)
    shares = [fetch(rank, 2, dataset=subset) for rank in range(2)]
    assert {**shares[0], **shares[1]} == whole


def test_a_worker_init_function_sees_the_attributes_of_the_data_set() -> None:
    def check(_: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        assert info.dataset.name == "augmented"

    assert len(fetch(num_workers=1, worker_init_fn=check)) == 40


class Plain(torch.utils.data.Dataset[Item]):
    """Counts how often its items are made. Some of them draw, if any do."""

    def __init__(self, drawing: frozenset[int] = frozenset()) -> None:
        self.made: list[int] = []
        self.drawing = drawing

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Item:
        self.made.append(index)
        return (index, *(Augmented()[index][1:] if index in self.drawing else (0.0, 0.0, 0.0)))


def test_items_that_draw_nothing_are_made_once_and_cost_no_seeding(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr("farandole.training.data.augmentation.seed_item", lambda *key: seeded.append(key[-1]))
    dataset = Plain()
    fetch(dataset=dataset, epochs=2)
    assert sorted(dataset.made) == sorted([*range(40), *range(40)])
    assert seeded == []


def test_the_batch_in_which_an_item_draws_for_the_first_time_is_fetched_anew() -> None:
    every = fetch()
    last = max(range(40), key=[sample for _, sample in every].index)
    dataset = Plain(frozenset([last]))
    seen = fetch(dataset=dataset)
    assert seen[0, last] == every[0, last]
    assert len(dataset.made) == 50


def test_an_item_that_fails_leaves_the_generators_as_they_are() -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> Item:
            super().__getitem__(index)
            raise KeyError(index)

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with pytest.raises(KeyError):
        fetch(dataset=Failing())
    after = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert after == (torch.rand(()).item(), random.random(), np.random.rand())
