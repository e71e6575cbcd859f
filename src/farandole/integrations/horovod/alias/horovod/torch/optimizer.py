"""DistributedOptimizer, under Horovod's path."""

from farandole import DistributedOptimizer as DistributedOptimizer
