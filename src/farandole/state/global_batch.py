"""The samples of one global batch, as handed to one worker: the atomic unit of progress. Pure."""

from __future__ import annotations

import msgspec


# Structs of msgspec: the loader creates both for each batch, and frozen dataclasses would take five times as long.
class GlobalBatch(msgspec.Struct, frozen=True):
    """A global batch, positions [start, stop) of the epoch's order, seen from one rank.

    epoch        number of the epoch, from 0
    start, stop  positions of the global batch in the epoch's order; stop - start samples in all
    low, high    positions of this rank's local batch; empty for a dummy batch
    micro_batches  number of runs of the loop body for this global batch, the same on every rank
    """

    epoch: int
    start: int
    stop: int
    low: int
    high: int
    micro_batches: int = 1

    @property
    def samples(self) -> int:
        """Number of samples in this rank's local batch."""
        return self.high - self.low

    @property
    def global_samples(self) -> int:
        """Number of samples in the whole global batch."""
        return self.stop - self.start


class Batch(msgspec.Struct, frozen=True):
    """A run of the loop body: a micro-batch of a global batch.

    low, high  positions of the real samples of this micro-batch; equal for a dummy batch
    index      number of the micro-batch in the global batch, from 0
    """

    global_batch: GlobalBatch
    low: int
    high: int
    index: int = 0

    @property
    def samples(self) -> int:
        return self.high - self.low

    @property
    def is_dummy(self) -> bool:
        """True when no sample counts. The tensors hold real samples all the same, so that the loop body runs."""
        return self.low == self.high

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
        return self.samples / self.global_batch.global_samples
