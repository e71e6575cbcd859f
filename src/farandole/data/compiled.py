"""Whether torch.compile is in use. The loaders ask."""

from __future__ import annotations

import sys


def has_compiled() -> bool:
    """Whether torch.compile has compiled something in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])
