"""torch remembers what operations make of DTensors, together with their meshes. registration.py has it forget that when
a generation begins: a mesh of the same ranks in the last one counts as equal, and its groups are over."""

from __future__ import annotations

import sys


def forget_meshes() -> None:
    """Of the calling thread, the main one: torch keeps them for each thread. Nothing where no DTensor was ever made."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_plans = getattr(_redistribute, "clear_redistribute_planner_cache", None)  # younger than the other one
    if clear_plans is not None:
        clear_plans()
