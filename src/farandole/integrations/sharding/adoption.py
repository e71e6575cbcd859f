"""What can follow the membership, of models that FSDP2 has divided: the rest is refused when training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farandole.base.env import read_checkpoint_env
from farandole.errors import ConfigError
from farandole.training.optim.optimizer_mixin import WrappedOptimizer
from farandole.training.state.step_state import StepState

if TYPE_CHECKING:
    from farandole.integrations.sharding.elastic_shards import ElasticShards

_OLDEST = "2.13"  # torch whose FSDP2 can be divided anew: sharded_modules.py uses what is private of it


def adopt_shards(state: StepState) -> ElasticShards:
    """Make the divided model of a state elastic, once. Raises ConfigError for what cannot follow the membership."""
    if state.shards is not None:
        found: ElasticShards = state.shards
        return found
    _refuse(state)
    try:
        from farandole.integrations.sharding.elastic_shards import ElasticShards

        shards = ElasticShards(state.modules(), state.optimizers()[0])
        shards.prove()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the FSDP2 of torch {torch.__version__} is another one than that of {_OLDEST}, and a model that "
            f"fully_shard() has divided could not be divided anew after a loss ({error}): use torch {_OLDEST}"
        ) from error
    return shards


def _refuse(state: StepState) -> None:
    if torch.__version__ < _OLDEST:
        raise ConfigError(
            f"a model that fully_shard() has divided needs torch {_OLDEST} or newer, this is {torch.__version__}: "
            f"update it, or use farandole.sharding.ShardedState (docs/hybrid-sharding.md)"
        )
    optimizers = state.optimizers()
    if len(optimizers) != 1 or isinstance(optimizers[0], WrappedOptimizer):
        raise ConfigError(
            "a model that fully_shard() has divided needs one optimizer in its TorchState, torch's own: do not wrap it"
        )
    if getattr(state.loader, "accumulates", False):
        raise ConfigError("micro_batch_size with a model that fully_shard() has divided is not supported: leave it out")
    if state.is_strict:
        raise ConfigError("strict mode with a model that fully_shard() has divided is not supported: leave shards out")
    if read_checkpoint_env() is not None:
        raise ConfigError(
            "--checkpoint with a model that fully_shard() has divided is not supported: leave it out, and save the "
            "model from the script, as with torch.distributed.checkpoint"
        )
    if state.keeps_scaler():
        raise ConfigError("a GradScaler with a model that fully_shard() has divided is not supported: use bfloat16")
