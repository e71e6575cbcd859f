"""Detection of torch.compile, for the loaders."""

from __future__ import annotations

import sys


def has_compiled() -> bool:
    """Return whether torch.compile has compiled something in this process; False where this torch does not say so."""
    # No public API counts compiled graphs. The counters are those that torch's compile troubleshooting guide reads.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and bool(counters["stats"]["unique_graphs"])
