"""Random numbers of a step: a function of (seed, step, rank), so that a step done again sees the same ones."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed the global generators of torch, numpy and Python. Never copied from another rank: that would give
    all workers the same dropout masks."""
    key = hashlib.blake2b(struct.pack("<3Q", seed, step, rank), digest_size=8).digest()
    value = int.from_bytes(key, "little")
    torch.manual_seed(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
