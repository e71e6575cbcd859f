"""The samples of one global batch, as handed to one worker: the atomic unit of progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division
    from farandole.training.state.shard_audit import Audit


# Structs of msgspec: the loader creates both for each batch, and frozen dataclasses would take five times as long.
class GlobalBatch(msgspec.Struct, frozen=True):
    """A global batch, positions [start, stop) of the epoch's order, seen from one rank.

    epoch        number of the epoch, from 0
    start, stop  positions of the global batch in the epoch's order; stop - start samples in all
    low, high    positions of this rank's local batch; empty for a dummy batch
    micro_batches  number of runs of the loop body for this global batch, the same on every rank unless has_own_bodies
    division     in strict mode, the shards of each rank: one run of the loop body for each; None: not strict
    place        this rank's place in it
    audit        in strict mode, the shards that other ranks compute again; the first run of the loop body is for it
    has_own_bodies  the number of runs is this rank's own: local batches follow the speed of the workers
    has_equal_shards  in strict mode, all shards have equally many samples
    added        number of loop bodies of a script whose gradients are added up in one step on each worker of the start
                 of its job, which may have other workers now; 0: gradients are those of the mean of all samples
    cuts         bounds of the micro-batches, where they are those that the script's own sampler has listed; their mean
                 losses count alike. Empty: the local batch is divided evenly, and all samples count alike
    content      of a stream, a hash of samples of it, the same on every rank that reads the same stream; else 0
    """

    epoch: int
    start: int
    stop: int
    low: int
    high: int
    micro_batches: int = 1
    division: Division | None = None
    place: int = 0
    audit: Audit | None = None
    has_own_bodies: bool = False
    has_equal_shards: bool = False
    added: int = 0
    cuts: tuple[int, ...] = ()
    content: int = 0

    @property
    def samples(self) -> int:
        """Number of samples in this rank's local batch."""
        return self.high - self.low

    @property
    def is_divided(self) -> bool:
        """True where the loop body may run several times for this global batch: if not here and now, in strict mode, in
        another world."""
        return self.micro_batches > 1 or (self.division is not None and self.division.shards > 1)

    @property
    def global_samples(self) -> int:
        """Number of samples in the whole global batch."""
        return self.stop - self.start


class Batch(msgspec.Struct, frozen=True):
    """A run of the loop body: a micro-batch of a global batch.

    low, high  positions of the real samples of this micro-batch; equal for a dummy batch
    index      number of the micro-batch in the global batch, from 0
    shard      in strict mode, number of the shard; -1: none
    is_audit   the shard is another rank's, and computed again to compare the results
    """

    global_batch: GlobalBatch
    low: int
    high: int
    index: int = 0
    shard: int = -1
    is_audit: bool = False

    @property
    def samples(self) -> int:
        return self.high - self.low

    @property
    def is_strict(self) -> bool:
        """True in strict mode, where each run of the loop body has a shard, or none."""
        return self.global_batch.division is not None

    @property
    def is_dummy(self) -> bool:
        """True when no sample counts. The tensors hold real samples all the same, so that the loop body runs."""
        return self.low == self.high or self.is_audit

    @property
    def is_padding(self) -> bool:
        """True when all micro-batches were handed out, and the loop body runs on until it calls step()."""
        return self.index >= self.global_batch.micro_batches

    def padding(self) -> Batch:
        """Return the batch for a run of the loop body that does not count."""
        return Batch(self.global_batch, self.high, self.high, self.global_batch.micro_batches)

    @property
    def is_last(self) -> bool:
        """True for the micro-batch whose backward pass reduces the gradients, and for padding after it."""
        return self.index >= self.global_batch.micro_batches - 1

    @property
    def weight(self) -> float:
        """Factor for the gradient of this micro-batch's mean loss. With it, the sum over all ranks and micro-batches is
        the gradient of the global batch's mean loss."""
        whole = self.global_batch
        if whole.cuts:  # each rank has as many samples as this one
            return whole.samples / (whole.global_samples * whole.micro_batches)
        return self.samples / whole.global_samples
