"""The samples of one global batch, as one worker was handed them: the atomic unit of progress. Pure."""

from __future__ import annotations

import msgspec


# Structs of msgspec's: the loader makes both for each batch, and frozen dataclasses would take five times as long.
class GlobalBatch(msgspec.Struct, frozen=True):
    """One global batch, positions [start, stop) of the epoch's order, seen from one rank.

    epoch        number of the epoch, from 0
    start, stop  positions of the global batch in the epoch's order; stop - start samples in all
    low, high    positions of this rank's local batch; empty for a dummy batch
    micro_batches  how many times the loop body runs for this global batch, the same on every rank
    """

    epoch: int
    start: int
    stop: int
    low: int
    high: int
    micro_batches: int = 1

    @property
    def samples(self) -> int:
        """Samples of this rank's local batch."""
        return self.high - self.low

    @property
    def global_samples(self) -> int:
        """Samples of the whole global batch."""
        return self.stop - self.start


class Batch(msgspec.Struct, frozen=True):
    """One run of the loop body: a micro-batch of a global batch.

    low, high  positions of the real samples of this micro-batch; equal for a dummy batch
    index      which micro-batch of the global batch, from 0
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
        """Real samples are in the tensors, so that the loop body runs, but they do not count."""
        return self.low == self.high

    @property
    def is_padding(self) -> bool:
        """All micro-batches were there, and the loop body has not called step(): it runs until it does."""
        return self.index >= self.global_batch.micro_batches

    def padding(self) -> Batch:
        """The batch for a loop body that does not count."""
        return Batch(self.global_batch, self.high, self.high, self.global_batch.micro_batches)

    @property
    def is_last(self) -> bool:
        """The micro-batch whose backward pass reduces the gradients; or padding, after it."""
        return self.index >= self.global_batch.micro_batches - 1

    @property
    def weight(self) -> float:
        """Factor for the gradient of this micro-batch's mean loss, so that the sum over all ranks and
        micro-batches is the gradient of the global batch's mean loss."""
        return self.samples / self.global_batch.global_samples
