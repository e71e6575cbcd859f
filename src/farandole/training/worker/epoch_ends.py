"""The meetings of all workers at the end of an epoch: they have come to the same place, or the script has an error."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from farandole.errors import CollectiveMismatch
from farandole.training.collectives import world
from farandole.training.collectives.agreement import DECIDE_TOGETHER

EPOCH_END = struct.Struct("<3qQ")
"""Epoch, decided steps, prepared, digest: what workers exchange at the end of an epoch."""

_ONCE = struct.Struct("<3q")  # epoch, decided steps, number of the call


@dataclass(frozen=True)
class EpochEnd:
    """What the workers say at the end of an epoch, by rank: RunLoop.prepared(), and the digests of their states."""

    prepared: list[int]
    digests: list[int]


def meet_at_epoch_end(epoch: int, decided: int, prepared: int, digest: int) -> EpochEnd:
    """Meet all workers. Raises CollectiveMismatch where they are not at the end of the same epoch, and RecoverableError
    when one is lost."""
    try:
        trailers = world.current().transport.all_gather(EPOCH_END.pack(epoch, decided, prepared, digest))
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"this worker has ended epoch {epoch} after step {decided}, and another one has not ({error}): all "
            f"workers have to leave the loop over the batches together. {DECIDE_TOGETHER}"
        ) from error
    by_rank = [EPOCH_END.unpack(trailer) for trailer in trailers]
    if any(each[:2] != by_rank[0][:2] for each in by_rank):
        raise CollectiveMismatch(
            f"workers ended different epochs; (epoch, step) by rank: {[each[:2] for each in by_rank]}"
        )
    return EpochEnd([each[2] for each in by_rank], [each[3] for each in by_rank])


def meet_at_call(epoch: int, decided: int, call: int) -> None:
    """Meet all workers at the `call`-th epoch.once() of an epoch. Raises CollectiveMismatch where they are at another
    one."""
    here = (epoch, decided, call)
    by_rank = [_ONCE.unpack(trailer) for trailer in world.current().transport.all_gather(_ONCE.pack(*here))]
    if any(each != here for each in by_rank):
        raise CollectiveMismatch(
            f"epoch.once() was called at different places; (epoch, step, number of the call) by rank: {by_rank}"
        )
