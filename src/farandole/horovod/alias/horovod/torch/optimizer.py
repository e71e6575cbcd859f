"""DistributedOptimizer, under Horovod's path."""

from farandole import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
