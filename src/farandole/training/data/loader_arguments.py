"""The arguments of the loaders. Those of torch's DataLoader that have another meaning here, or none, are refused, each
with its reason; of two names for one thing, one is to be given; what is left out is as the job has it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from farandole.base.env import prepare_for_strict_mode, read_job_env, read_rank_and_size
from farandole.errors import ConfigError, DataError
from farandole.training.data.partition import Tail
from farandole.training.data.sample_order import Order, Sequential, Shuffled

if TYPE_CHECKING:
    from farandole.training.state.shard_audit import AuditRule

_OWN_ORDER = "seed and order determine the order of samples, so that they can be divided again when workers change"

# Values that request the default behaviour; of the other arguments it is None.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "batch_size": (),
    "in_order": (True,),
    "shuffle": (False, None),
    "drop_last": (False,),
}

_REASONS: Mapping[str, str] = {
    "batch_size": "in torch it counts the samples of one worker; give global_batch_size, which counts those of all",
    "sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "batch_sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "generator": "random numbers are derived from seed, so that they are the same on every worker; give seed=",
    "in_order": "batches are returned in the order of the epoch, since the cursor counts them in that order",
}

_ORDER_OF_STREAMS = "samples have the order in which the streams of the data set yield them"
STREAM_ARGUMENTS: Mapping[str, str] = {
    **_REASONS,
    "sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "batch_sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "shuffle": f"{_ORDER_OF_STREAMS}; shuffle in the data set, by the number that is passed to set_epoch()",
    "drop_last": "the last global batch of an epoch is shorter: the length of a stream is not known in advance",
}
"""Reasons of StreamLoader."""


def refuse_torch_arguments(
    given: Mapping[str, object],
    known: Iterable[str],
    loader: str = "DataLoader",
    reasons: Mapping[str, str] = _REASONS,
) -> None:
    """Raise ConfigError for an argument of torch that cannot be supported, TypeError for an unknown one."""
    for name, value in given.items():
        if name not in reasons:
            close = difflib.get_close_matches(name, [*known, *reasons], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{loader} has no argument {name!r}{hint}")
        if not any(value is each for each in _HARMLESS.get(name, (None,))):
            raise ConfigError(f"{loader}: {name}={value!r} is not supported: {reasons[name]}")


def order_of(order: Order | None, shuffle: bool) -> Order:
    """Return the order of the samples. Raises ConfigError where both arguments say one."""
    if order is None:
        return Shuffled() if shuffle else Sequential()
    if not shuffle:
        raise ConfigError(f"DataLoader: shuffle=False and order={order.identity} contradict each other; give one")
    return order


def tail_of(tail: Tail | None, drop_last: bool) -> Tail:
    """Return the use of the last samples of an epoch. Raises ConfigError where both arguments say one."""
    if drop_last and tail not in (None, "drop"):
        raise ConfigError(f"DataLoader: drop_last=True and tail={tail!r} contradict each other; give one")
    return "drop" if drop_last else tail or "short"


def most_samples(max_local_batch: int | None, micro_batch_size: int | None) -> int | None:
    """Return the most samples of one loop body. Raises DataError where the user has given both names."""
    if max_local_batch is not None and micro_batch_size is not None:
        raise DataError(
            f"micro_batch_size={micro_batch_size} and max_local_batch={max_local_batch} both limit the samples of one "
            f"loop body; give one"
        )
    return max_local_batch if micro_batch_size is None else micro_batch_size


# Strict mode ----------------------------------------------------------------------------------------------------------

MOST_SHARDS = 4096
"""A step sums up the shards of a worker one after the other; more of them would only be a mistake."""


def number_of_shards(strict: bool | None, shards: int | None, global_batch_size: int, most: int | None) -> int:
    """Return the number of shards of a global batch; 0: not strict. `strict` and `shards` are the user's arguments;
    None: as the job. `most`: most samples of one loop body. Raises DataError where the shards do not divide the global
    batch, and ConfigError where arguments contradict each other."""
    job = read_job_env()
    if strict is False and shards is not None:
        raise ConfigError(f"DataLoader: strict=False and shards={shards} contradict each other; give one")
    if strict is False or not (strict or shards is not None or job.strict):
        return 0
    wanted = shards if shards is not None else job.shards or read_rank_and_size()[1]
    if not 1 <= wanted <= MOST_SHARDS:
        raise DataError(f"shards must be in 1..{MOST_SHARDS}, got {wanted}")
    if global_batch_size % wanted:
        from farandole.training.collectives.shard_tree import shards_that_fit

        fitting = ", ".join(map(str, shards_that_fit(global_batch_size, wanted))) or "none of at least so many"
        raise DataError(
            f"global_batch_size={global_batch_size} cannot be divided into {wanted} equal shards. Numbers of shards "
            f"that fit: {fitting}; a global batch that fits: {-(-global_batch_size // wanted) * wanted}"
        )
    return wanted * (1 if most is None else -(-(global_batch_size // wanted) // most))


def shards_to_continue_with(ours: int, saved: int, is_default: bool) -> int:
    """Return the number of shards with which the training continues: the saved one, where this loader has no number
    of its own (`is_default`). 0: not strict. Raises DataError where both have one, and they differ."""
    if not ours or not saved or is_default:
        return saved if ours and saved else ours
    if ours != saved:
        raise DataError(
            f"the saved loader has {saved} shards, this one {ours}: the model would not be the same; leave shards "
            f"out, or use the number that it was saved with"
        )
    return ours


def pin_arithmetic() -> None:
    """Compute with one thread, unless the job was started with a number for all workers (--strict)."""
    prepare_for_strict_mode()
    if not read_job_env().strict:
        torch.set_num_threads(1)


def audit_rule(audit: float | None, seed: int, shards: int) -> AuditRule | None:
    """Return the rule by which shards are computed again; None: the loader is not strict, with 0 shards. `audit` is the
    user's argument; None: as the job. Raises ConfigError where it is no fraction, or the loader is not strict."""
    if not shards:
        if audit:
            raise ConfigError(f"DataLoader: audit={audit:g} needs strict mode: give strict=True, or leave it out")
        return None
    from farandole.training.state.shard_audit import AuditRule  # loaded only in strict mode

    fraction = read_job_env().audit if audit is None else audit
    if not 0 <= fraction <= 1:
        raise ConfigError(f"DataLoader: audit is a fraction of the shards, from 0 to 1, got {fraction:g}")
    return AuditRule(fraction, seed)


# Balance --------------------------------------------------------------------------------------------------------------


def follows_speed(balance: str | None) -> bool:
    """Return whether local batches follow the speed of the workers. `balance` is the user's argument; None: as the job.
    Raises ConfigError for another value."""
    if balance not in (None, "auto", "off"):
        raise ConfigError(f'DataLoader: balance must be "auto" or "off", got {balance!r}')
    return (balance or read_job_env().balance) == "auto"


def refuse_sync_batch_norm(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError for layers of which each forward pass waits for the other workers: these may run the loop body
    for a global batch another number of times (`ElasticLoader.has_own_bodies`)."""
    for module in modules:
        if any(type(each).__name__ == "SyncBatchNorm" for each in module.modules()):
            raise ConfigError(
                "balance with several loop bodies for a global batch, and SyncBatchNorm: workers would run its forward "
                "pass a different number of times, and wait for each other; leave balance, or max_local_batch and "
                "micro_batch_size, out, or use BatchNorm"
            )
