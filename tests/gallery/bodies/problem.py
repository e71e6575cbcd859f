"""The data and the models that the bodies of the gallery train: small, and in float64, so that how a batch is divided
changes nothing but rounding."""

from __future__ import annotations

import os
from typing import Any

import torch

SAMPLES, EPOCHS = int(os.environ.get("GALLERY_SAMPLES", "96")), int(os.environ.get("GALLERY_EPOCHS", "2"))
BATCH, FEATURES = 12, 6


class Samples(torch.utils.data.Dataset[Any]):
    """Inputs, targets, and the number of the sample."""

    def __init__(self, size: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Mark(torch.autograd.Function):
    """Leaves its input as it is. In backward, each sample of the batch adds 1 / share to the
    gradient of its entry of `seen`, whatever the loss: under plain SGD that counts how often a sample was trained."""

    @staticmethod
    def forward(context: Any, out: torch.Tensor, seen: torch.Tensor, index: torch.Tensor, share: int) -> torch.Tensor:
        context.save_for_backward(index)
        context.size, context.share = len(seen), share
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (index,) = context.saved_tensors
        marks = torch.zeros(context.size, dtype=torch.float64)
        marks.index_add_(0, index, torch.full((len(index),), 1 / context.share, dtype=torch.float64))
        return gradient, marks, None, None


class Net(torch.nn.Module):
    """Two layers, and a witness of which samples were trained.

    share  of how many samples a batch is taken to be by the witness; None: as many as it has
    """

    share: int | None = None

    def __init__(self, *between: torch.nn.Module, hidden: int = 8, size: int = SAMPLES) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(FEATURES, hidden)
        self.between = torch.nn.Sequential(*between, torch.nn.Tanh())
        self.last = torch.nn.Linear(hidden, 1)
        self.seen = torch.nn.Parameter(torch.zeros(size))
        self.double()

    def forward(self, x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        out = self.last(self.between(self.first(x)))
        return out if index is None else Mark.apply(out, self.seen, index, self.share or len(index))
