"""Models that are divided among workers (FSDP2), in worlds that change."""

from farandole.sharding.sharded_state import ShardedState

__all__ = ["ShardedState"]
