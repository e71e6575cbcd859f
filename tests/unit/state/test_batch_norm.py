"""Running statistics of BatchNorm layers become those of all workers together."""

from __future__ import annotations

import pytest
import torch

from farandole.training.state.watched_tensors import layers_with_statistics, make_statistics_equal
from tests.support.thread_world import ThreadWorld

pytestmark = pytest.mark.core


def test_all_workers_get_the_statistics_of_all_samples_together() -> None:
    torch.manual_seed(1)
    samples = [torch.randn(50, 4, dtype=torch.float64) * (1 + rank) + rank for rank in range(3)]
    models = [torch.nn.Sequential(torch.nn.BatchNorm1d(4, momentum=1.0).double()) for _ in samples]
    for model, batch in zip(models, samples, strict=True):
        model(batch)
        model[0].running_var.copy_(batch.var(0, unbiased=False))
    ThreadWorld(3).run(
        lambda transport: make_statistics_equal(layers_with_statistics([models[transport.rank]]), transport)
    )
    everything = torch.cat(samples)
    for model in models:
        assert torch.allclose(model[0].running_mean, everything.mean(0), atol=1e-12)
        assert torch.allclose(model[0].running_var, everything.var(0, unbiased=False), atol=1e-12)
        assert torch.equal(model[0].running_var, models[0][0].running_var)


def test_statistics_that_are_equal_stay_as_they_are() -> None:
    models = [torch.nn.BatchNorm2d(3) for _ in range(3)]
    for model in models:
        model.running_mean.copy_(torch.tensor([0.1, 0.2, 0.7]))
        model.running_var.copy_(torch.tensor([0.3, 1e-9, 5e8]))
    before = models[0].running_var.clone()
    ThreadWorld(3).run(
        lambda transport: make_statistics_equal(layers_with_statistics([models[transport.rank]]), transport)
    )
    assert torch.allclose(models[1].running_var, before, rtol=1e-6)


def test_layers_without_statistics_and_shared_ones_are_counted_right() -> None:
    norm = torch.nn.BatchNorm1d(2)
    model = torch.nn.Sequential(norm, torch.nn.LayerNorm(2), torch.nn.BatchNorm1d(2, track_running_stats=False), norm)
    assert layers_with_statistics([model, norm]) == [norm]
