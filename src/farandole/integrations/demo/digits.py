"""The data of the demo: scikit-learn's handwritten digits where it is installed, else digits that are drawn with torch
alone, and so need no further package and no network."""

from __future__ import annotations

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

TRAINED, TESTED = 1437, 360
_PIXELS = 8
_SEED = 7

# Five columns and seven rows for each digit, a row as a number in base 2.
_SHAPES = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


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


def drawn_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return what digits() does: drawn with a random place, size, slant and noise."""
    random = torch.Generator().manual_seed(_SEED)
    count = TRAINED + TESTED
    labels = torch.randint(0, 10, (count,), generator=random)
    images = F.grid_sample(_shapes()[labels], _places(count, random), align_corners=False)
    images = (images + 0.15 * torch.randn(images.shape, generator=random)).clamp(0, 1)
    return (
        TensorDataset(images[:TRAINED], labels[:TRAINED]),
        TensorDataset(images[TRAINED:], labels[TRAINED:]),
    )


def _shapes() -> torch.Tensor:
    rows = torch.tensor(_SHAPES)
    bits = (rows.unsqueeze(2) >> torch.arange(4, -1, -1)) & 1
    return F.pad(bits.float(), (2, 2, 1, 1)).unsqueeze(1)


def _places(count: int, random: torch.Generator) -> torch.Tensor:
    """Return the point of the shape that each pixel shows."""
    draw = torch.rand((5, count), generator=random) * 2 - 1
    angle, shear = draw[0] * math.radians(12), draw[1] * 0.15
    size, across, down = 1.0 + draw[2] * 0.12, draw[3] * 0.15, draw[4] * 0.12
    cos, sin = torch.cos(angle) * size, torch.sin(angle) * size
    maps = torch.stack(
        [torch.stack([cos, -sin + shear, across], dim=1), torch.stack([sin, cos, down], dim=1)],
        dim=1,
    )
    return F.affine_grid(maps, [count, 1, _PIXELS, _PIXELS], align_corners=False)
