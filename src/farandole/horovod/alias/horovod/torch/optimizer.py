"""DistributedOptimizer, where scripts look for it."""

from farandole import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
