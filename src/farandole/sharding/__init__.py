"""State of models that are divided among workers (FSDP2), in worlds of changing size."""

from farandole.sharding.sharded_state import ShardedState

__all__ = ["ShardedState"]
