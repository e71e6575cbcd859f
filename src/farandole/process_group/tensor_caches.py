"""Clear torch's caches of DTensor operations, which hold their meshes. registration.py does so in each generation.

A mesh of the same ranks in the last generation counts as equal, and its groups are over.
"""

from __future__ import annotations

import sys

from farandole.process_group.old_torch import clear_planner_cache, clear_sharding_cache


def forget_meshes() -> None:
    """Clear the caches of the calling thread, the main one: torch keeps them per thread.

    Does nothing where no DTensor was ever made.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    clear_sharding_cache()
    clear_planner_cache()
