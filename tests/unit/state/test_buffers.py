"""Buffers of modules."""

from __future__ import annotations

import pytest
import torch

from farandole.training.state.watched_tensors import buffers_of

pytestmark = pytest.mark.core


def test_they_are_those_that_torch_names_in_the_same_order() -> None:
    shared = torch.nn.BatchNorm1d(2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), shared, torch.nn.Sequential(shared, torch.nn.BatchNorm1d(2)))
    model.register_buffer("own", torch.zeros(3), persistent=False)
    model.register_buffer("none", None)
    model.add_module("nothing", None)
    ours, theirs = buffers_of(model), dict(model.named_buffers())
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in theirs)
