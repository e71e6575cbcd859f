"""DistributedOptimizer, where scripts look for it."""

from farandole.optim.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
