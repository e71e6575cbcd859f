"""torch remembers what operations make of DTensors, together with their meshes. registration.py has it forget that when
a generation begins: a mesh of the same ranks in the last one counts as equal, and its groups are over."""

from __future__ import annotations

import sys

from farandole.process_group.old_torch import clear_planner_cache, clear_sharding_cache


def forget_meshes() -> None:
    """Of the calling thread, the main one: torch keeps them for each thread. Nothing where no DTensor was ever made."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    clear_sharding_cache()
    clear_planner_cache()
