"""Memory settings: memory that one step frees is kept for the next one, and a newcomer has it before it joins.

Gradients are allocated and freed in each step. The C library returns large blocks to the system at once, which clears
them and maps them anew: 37 of 170 ms of a step of ResNet-18 on one core, and more with DistributedDataParallel.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch

from farandole.env import has_malloc_settings

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_KEPT_BYTES = 512 << 20
"""Bytes that may be free at the end of the heap before they are returned: far more than a step allocates and frees,
less than a restored checkpoint leaves."""

_MAPPED_BYTES = 32 << 20
"""Larger blocks are always returned: the largest value that the library allows."""


_STATE_AND_GRADIENTS = 4
"""This many times the parameters: they arrive, with two tensors of Adam's for each, and there are gradients."""

_MOST_AHEAD_BYTES, _PIECE_BYTES = 384 << 20, 16 << 20

_is_kept = False


def keep_freed_memory() -> bool:
    """Keep freed memory from now on, in this process. False: it has another C library, or the user has set this
    otherwise."""
    global _is_kept
    _is_kept = _is_kept or _set_limits()
    return _is_kept


def map_ahead(modules: Iterable[torch.nn.Module]) -> None:
    """Have the system map memory now for the tensors that a worker with these modules receives when it joins, and for
    its first step: later, the others would wait for that. Does nothing where freed memory is not kept."""
    if not _is_kept:
        return
    nbytes = _STATE_AND_GRADIENTS * sum(p.numel() * p.element_size() for each in modules for p in each.parameters())
    pieces = min(nbytes, _MOST_AHEAD_BYTES) // _PIECE_BYTES
    mapped = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(pieces)]
    mapped.clear()


def _set_limits() -> bool:
    if sys.platform != "linux" or has_malloc_settings():
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
