"""Tensors that come from loader processes are those that were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farandole as fd
from farandole.training.state import step

pytestmark = pytest.mark.core

TENSORS = {
    "small": torch.arange(6.0).reshape(2, 3),
    "large": torch.arange(100_000),
    "empty": torch.empty(0, 3),
    "without dimensions": torch.tensor(3, dtype=torch.int16),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "with a gradient": torch.ones(2, requires_grad=True),
}


class OneOfEach:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(TENSORS)


@pytest.fixture(scope="module")
def received() -> Any:
    loader = fd.elastic.DataLoader(OneOfEach(), 1, num_workers=1, collate_fn=lambda items: items[0])
    batch = next(iter(loader))
    yield batch
    loader.close()
    step.close()


@pytest.mark.parametrize("name", TENSORS)
def test_values_dtype_and_strides_are_the_same_whatever_the_tensor(received: Any, name: str) -> None:
    ours, sent = received[name], TENSORS[name]
    assert ours.dtype == sent.dtype
    assert ours.requires_grad == sent.requires_grad
    assert torch.equal(ours, sent)
    assert ours.stride() == sent.stride()


def test_small_ones_come_by_value_and_large_ones_in_shared_memory(received: Any) -> None:
    assert not received["small"].is_shared()
    assert received["large"].is_shared()


def test_what_came_can_be_changed_in_place(received: Any) -> None:
    for name in ("small", "large"):
        before = received[name].clone()
        assert torch.equal(received[name].add_(1).sub_(1), before)
