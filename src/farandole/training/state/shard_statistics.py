"""Running statistics in strict mode: each shard begins with those of the last step, and the mean over the shards, added
up in the order of their tree, is what the step leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from farandole.errors import ConfigError
from farandole.training.collectives.shard_sums import with_shards
from farandole.training.collectives.shard_tree import leaves
from farandole.training.collectives.transport import Transport
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.tensor_digest import digest_of


class ShardStatistics:
    """The running means and variances of layers like BatchNorm; `values` are the live ones. Raises ConfigError for a
    layer that computes its statistics over the batches of all workers."""

    def __init__(self, layers: Sequence[_NormBase]) -> None:
        self.values: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        for layer in layers:
            if isinstance(layer, SyncBatchNorm) or type(layer).__name__ == "SyncBatchNorm":
                raise ConfigError(
                    f"strict mode: {type(layer).__name__} normalizes over the batches of all workers, whose number may "
                    f"change; use BatchNorm, which normalizes over a shard"
                )
            assert layer.running_mean is not None
            assert layer.running_var is not None
            self.values += [layer.running_mean, layer.running_var]
            if layer.num_batches_tracked is not None:
                self._counts.append(layer.num_batches_tracked)
        self._global_batch: GlobalBatch | None = None
        self._by_shard: dict[int, torch.Tensor] = {}  # weighted statistics after each of this rank's shards
        self._counted: list[torch.Tensor] = []
        self._combined: torch.Tensor | None = None

    def record(self, batch: Batch) -> None:
        """Take the statistics of a loop body, at the end of a backward pass; the last one of a body counts."""
        if not self.values:
            return
        if batch.global_batch is not self._global_batch:
            self._global_batch, self._combined = batch.global_batch, None
            self._by_shard.clear()
        self._counted = [count.clone() for count in self._counts]
        if batch.samples:
            self._by_shard[batch.shard] = self._flat().mul_(batch.weight)

    def end_body(self, batch: Batch) -> None:
        """Take the statistics of a loop body that had no backward pass: its forward passes count."""
        if batch.global_batch is not self._global_batch or (batch.samples and batch.shard not in self._by_shard):
            self.record(batch)

    def combine(self, batch: Batch, transport: Transport) -> None:
        """Add up the statistics of all shards. Raises the errors of transports."""
        division = batch.global_batch.division
        if not self.values or division is None:
            return
        self.end_body(batch)
        start, stop = division.ranges[batch.global_batch.place]
        sums: list[torch.Tensor] = []
        for shard, leaf in zip(range(start, stop), leaves(start, stop, division.shards), strict=True):
            found = self._by_shard.get(shard)
            total = torch.zeros_like(self._flat()) if found is None else found.clone()
            for _ in range(leaf.summands):
                torch.add(sums.pop(), total, out=total)
            sums.append(total)
        rows = sums or [torch.zeros_like(self._flat())]
        with_shards(transport).all_reduce_shards(rows, division)
        self._combined = rows[0]

    def digest_of(self, shard: int) -> int:
        """Return a digest of the statistics that a shard of the current global batch has left, computed here for the
        step or for an audit; 0 without any."""
        found = self._by_shard.get(shard)
        return 0 if found is None else digest_of([found])

    def install(self, batch: Batch) -> None:
        """Set the statistics to those of the whole global batch: its step is decided."""
        if self._combined is None or batch.global_batch is not self._global_batch:
            return
        with torch.no_grad():
            parts = torch.split(self._combined, [value.numel() for value in self.values])
            for value, part in zip(self.values, parts, strict=True):
                value.copy_(part.view_as(value))
            for count, counted in zip(self._counts, self._counted, strict=True):
                count.copy_(counted)
        self._combined = None

    def _flat(self) -> torch.Tensor:
        return torch.cat([value.detach().reshape(-1).double() for value in self.values])
