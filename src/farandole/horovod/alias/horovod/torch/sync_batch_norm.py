"""SyncBatchNorm, under Horovod's path."""

from farandole import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
