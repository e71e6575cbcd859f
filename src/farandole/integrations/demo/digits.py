"""The data of the demo: scikit-learn's handwritten digits where it is installed, else digits that torch draws."""

from __future__ import annotations

import importlib.util

import torch
from torch.utils.data import TensorDataset

from farandole.integrations.demo.drawn_digits import TESTED, TRAINED, drawn_digits

_SEED = 7


def has_handwritten() -> bool:
    """Return whether the handwritten digits are there: 1,797 images that scikit-learn contains."""
    return importlib.util.find_spec("sklearn") is not None


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return images to train on and images to test on, always the same ones, 1 x 8 x 8 pixels from 0 to 1 (float32),
    each with its digit (int64)."""
    return _handwritten() if has_handwritten() else drawn_digits()


def _handwritten() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(TRAINED + TESTED, generator=torch.Generator().manual_seed(_SEED))
    images, labels = images[order], labels[order]
    return TensorDataset(images[TESTED:], labels[TESTED:]), TensorDataset(images[:TESTED], labels[:TESTED])
