"""SyncBatchNorm, where scripts look for it."""

from farandole.collectives.named.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
