"""Farandole: elastic data-parallel training for PyTorch. The public names, loaded when first used: the command
line must start without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole import elastic
    from farandole.collectives.agreement import any, mean
    from farandole.errors import FarandoleError, FatalError, RecoverableError
    from farandole.optim.distributed_optimizer import DistributedOptimizer
    from farandole.worker.context import (
        cross_rank,
        cross_size,
        device,
        generation,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
        slot,
    )

__version__ = "0.1.0.dev0"

_HOME = {
    "any": "farandole.collectives.agreement",
    "mean": "farandole.collectives.agreement",
    "FarandoleError": "farandole.errors",
    "FatalError": "farandole.errors",
    "RecoverableError": "farandole.errors",
    "DistributedOptimizer": "farandole.optim.distributed_optimizer",
    "cross_rank": "farandole.worker.context",
    "cross_size": "farandole.worker.context",
    "device": "farandole.worker.context",
    "generation": "farandole.worker.context",
    "init": "farandole.worker.context",
    "is_initialized": "farandole.worker.context",
    "local_rank": "farandole.worker.context",
    "local_size": "farandole.worker.context",
    "rank": "farandole.worker.context",
    "shutdown": "farandole.worker.context",
    "size": "farandole.worker.context",
    "slot": "farandole.worker.context",
}

__all__ = [
    "DistributedOptimizer",
    "FarandoleError",
    "FatalError",
    "RecoverableError",
    "any",
    "cross_rank",
    "cross_size",
    "device",
    "elastic",
    "generation",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mean",
    "rank",
    "shutdown",
    "size",
    "slot",
]


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("farandole.elastic")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'farandole' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
