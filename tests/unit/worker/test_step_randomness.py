"""Dropout of a step that is done again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import GenerationEnded
from farandole.training.worker.step_randomness import reseed

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


def draw(rank: int) -> float:
    reseed(3, 7, rank)
    return torch.rand(()).item()


def test_ranks_see_different_numbers_and_each_the_same_again() -> None:
    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_is_done_again_sees_the_same_dropout_and_the_same_augmentation(num_workers: int) -> None:
    class Noisy(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(3) + index

    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    loader = fd.elastic.DataLoader(Noisy(), 4, seed=4, num_workers=num_workers)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    inputs, masks = [], []

    @fd.elastic.run
    def train(state: Any, steps: int) -> None:
        for x in state.loader:
            inputs.append(x)
            masks.append(model[0](torch.ones(4, 3)))
            if len(inputs) > steps:
                raise GenerationEnded("mean", 1, "a worker was lost")
            model(x).sum().backward()
            optimizer.step()

    with pytest.raises(GenerationEnded):
        train(state, 1)
    with pytest.raises(GenerationEnded):
        train(state, 2)
    loader.close()
    assert len(inputs) == 3
    assert torch.equal(inputs[1], inputs[2])
    assert torch.equal(masks[1], masks[2])
