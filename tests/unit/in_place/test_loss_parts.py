"""What the top of a loss's graph shows: whether the loss grows with the samples of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farandole.in_place.loss_parts import Part, are_means, grow, parts_of

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def losses(loss: Loss, samples: int) -> list[Part]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 5, generator=generator, requires_grad=True)
    y = torch.randint(0, 5, (samples,), generator=generator)
    return parts_of(loss(x, y))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: F.cross_entropy(x, y, reduction="none").sum() / 4,
        lambda x, y: F.cross_entropy(x, y) * len(x),
        lambda x, y: F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1),
        lambda x, y: F.mse_loss(x, torch.ones_like(x), reduction="sum") * torch.tensor(0.5),
        lambda x, y: F.cross_entropy(x, y) + 0.1 * -x.square().sum().to(torch.float64),
        lambda x, y: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="sum") + x.exp().sum(),
    ],
)
def test_a_sum_over_the_samples_grows_with_them(loss: Loss) -> None:
    assert grow(losses(loss, 4), 4, losses(loss, 6), 6)
    assert not grow(losses(loss, 4), 4, losses(loss, 4), 4)
    assert not are_means(losses(loss, 6), losses(loss, 4))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y),
        lambda x, y: F.cross_entropy(x, y) / 4 + 2 * x.square().mean(),
        lambda x, y: F.smooth_l1_loss(x, torch.zeros_like(x)),
    ],
)
def test_a_mean_over_the_samples_does_not(loss: Loss) -> None:
    assert not grow(losses(loss, 4), 4, losses(loss, 6), 6)
    assert are_means(losses(loss, 6), losses(loss, 4))
    assert are_means(losses(loss, 6), [])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, reduction="sum") / len(x),
        lambda x, y: x.square().sum() / x.numel(),
        lambda x, y: F.cross_entropy(x, y, reduction="none").sum() / (y > 2).sum(),
        lambda x, y: torch.stack([x.mean(), x.square().mean()]).sum(),
        lambda x, y: x.square().sum() / x.exp().sum(),
        lambda x, y: x.norm(),
    ],
)
def test_a_sum_that_is_divided_by_something_of_the_samples_does_not_grow_with_them(loss: Loss) -> None:
    assert not grow(losses(loss, 4), 4, losses(loss, 6), 6)
    assert not are_means(losses(loss, 6), losses(loss, 4))


def test_a_mean_whose_factor_changes_may_have_something_of_other_workers_in_it() -> None:
    assert not are_means(losses(lambda x, y: x.mean() / 5, 4), losses(lambda x, y: x.mean() / 7, 4))


@pytest.mark.parametrize(
    ("options", "is_weighted"),
    [
        ({}, False),
        ({"ignore_index": 7}, False),
        ({"ignore_index": 0}, True),
        ({"weight": torch.arange(1.0, 6.0)}, True),
    ],
)
def test_a_mean_over_labels_is_weighted_where_some_of_them_count_otherwise(
    options: dict[str, Any], is_weighted: bool
) -> None:
    parts = parts_of(F.cross_entropy(torch.randn(5, 5, requires_grad=True), torch.arange(5), **options))
    assert [each.is_weighted() for each in parts] == [is_weighted]
    assert not parts_of(torch.randn(5, requires_grad=True).mean())[0].is_weighted()


def test_a_loss_without_a_graph_has_no_parts_and_one_of_many_has_the_first_of_them() -> None:
    assert parts_of(torch.ones(())) == []
    assert len(losses(lambda x, y: torch.as_tensor(sum(each.mean() for each in x)), 100)) == 64
