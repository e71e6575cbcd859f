"""Losses of a small classifier, for the trials of losses and of divisions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class State:
    """The part of a TorchState that a trial looks at."""

    shards = None  # the model is not divided

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def modules(self) -> list[torch.nn.Module]:
        return [self.model]


def mean(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def total(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="sum") / 4


def weighted(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
