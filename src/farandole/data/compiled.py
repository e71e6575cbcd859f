"""Detection of torch.compile, for the loaders."""

from __future__ import annotations

import sys


def has_compiled() -> bool:
    """Return whether torch.compile has compiled something in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])
