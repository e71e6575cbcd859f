"""State of models that are divided among workers (FSDP2), in worlds of changing size."""

from farandole.integrations.sharding.sharded_state import ShardedState as ShardedState

__all__ = ["ShardedState"]
