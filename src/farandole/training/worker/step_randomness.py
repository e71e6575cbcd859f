"""Random numbers of a step: a function of (seed, step, rank), so that a repeated step gets the same ones."""

from __future__ import annotations

import hashlib
import random
import struct
from functools import cache

import numpy as np
import torch

_UINT64 = (1 << 64) - 1


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed the global generators of torch, numpy and Python. Never copied from another rank: that would give
    all workers the same dropout masks."""
    # Not cryptographic: the fastest function of the standard library that mixes bits well.
    parts = struct.pack("<3Q", seed & _UINT64, step, rank)
    value = int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little")
    kind = _accelerator()
    if kind not in ("", "cuda"):
        torch.manual_seed(value >> 1)
    else:
        # torch.manual_seed() also keeps a traceback for each kind of device that may come later: half a millisecond
        # (torch 2.13, torch/random.py, _manual_seed_impl, and torch/cuda/__init__.py, _lazy_call).
        torch.default_generator.manual_seed(value >> 1)
        if kind:
            torch.cuda.manual_seed_all(value >> 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@cache
def _accelerator() -> str:
    """Return the type of this machine's devices; "" if there are none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None else found.type
