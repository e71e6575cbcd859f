"""Random numbers of a step: a function of (seed, step, rank), so that a step done again sees the same ones."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed the global generators of torch, numpy and Python. Never copied from another rank: that would give
    all workers the same dropout masks."""
    value = _mixed(_mixed(_mixed(seed) + step) + rank)
    if _has_accelerator():
        torch.manual_seed(value >> 1)
    else:
        # torch.manual_seed() also keeps a traceback for devices that may come later: half a millisecond.
        torch.default_generator.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def _mixed(number: int) -> int:
    """64 bits that look unlike those of every other number: a step of SplitMix64 (Steele, Lea, Flood 2014). In every
    step, so not a cryptographic hash."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


_MASK = (1 << 64) - 1


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
