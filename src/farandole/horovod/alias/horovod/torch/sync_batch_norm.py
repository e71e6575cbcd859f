"""SyncBatchNorm, where scripts look for it."""

from farandole import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
