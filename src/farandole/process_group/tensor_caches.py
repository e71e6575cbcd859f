"""torch remembers what operations make of DTensors, together with their meshes. registration.py has it forget that when
a generation begins: a mesh of the same ranks in the last one counts as equal, and its groups are over."""

from __future__ import annotations

import sys


def forget_meshes() -> None:
    """Of the calling thread, the main one: torch keeps them for each thread. Nothing where no DTensor was ever made."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    else:  # torch 2.6 to 2.9: LocalLRUCache of torch/distributed/tensor/_sharding_prop.py, and no other
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # torch 2.6 to 2.9 keep no plans
        _redistribute.clear_redistribute_planner_cache()
