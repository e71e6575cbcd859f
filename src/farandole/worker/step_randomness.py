"""Random numbers of a step: a function of (seed, step, rank), so that a repeated step gets the same ones."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch

from farandole.mixing import mixed


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed the global generators of torch, numpy and Python. Never copied from another rank: that would give
    all workers the same dropout masks."""
    value = mixed(mixed(mixed(seed) + step) + rank)
    if _has_accelerator():
        torch.manual_seed(value >> 1)
    else:
        # torch.manual_seed() also keeps a traceback for devices that may come later: half a millisecond (torch 2.13,
        # torch/random.py, _manual_seed_impl, and torch/cuda/__init__.py, _lazy_call).
        torch.default_generator.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
