"""Gradients in strict mode: those of each shard are computed alone, and added up in the order of the shards' tree.

A worker keeps the sums of its own shards in rows of buckets: one row where it has one shard or two, and one more each
time that their number doubles, since the sum of some shards waits there for that of the next ones. See
collectives/shard_tree.py.

With large models the time of this is that of the memory, so that each gradient is read once and each sum written once.
A gradient to which that of the next shard will be added waits as autograd has made it. Where all shards have the same
factor, the transport multiplies the sum by it, while that is in the cache.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Collection, Mapping, Sequence

import torch

from farandole.errors import ConfigError
from farandole.training.collectives.shard_sums import with_shards
from farandole.training.collectives.shard_tree import leaves
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.world import World
from farandole.training.optim.bucketed_gradients import BucketedGradients, CompressedReduce
from farandole.training.optim.buckets import Buckets
from farandole.training.optim.compression import Compressor, NoneCompressor
from farandole.training.optim.step_agreement import conclude, header_of
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.numerics import RepeatedShards, refuse_others
from farandole.training.state.session import SESSION
from farandole.training.state.shard_audit import Audit
from farandole.training.state.tensor_digest import digest_of

_MAY_BE_SUMMED_FIRST = {torch.float32, torch.float64, torch.bfloat16}
"""Dtypes in which the sum over all shards does not overflow where their mean does not."""


class ShardGradients(BucketedGradients):
    """Gradients of one optimizer in strict mode. begin() comes first."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        digest: int,
        compression: Compressor,
        pinned_bytes: int | None,
        loss_is_mean: bool,
    ) -> None:
        if compression is not NoneCompressor:
            raise ConfigError(
                "strict mode sums up gradients as they are: what compression rounds depends on the number of workers; "
                "leave compression out"
            )
        super().__init__(names, digest, CompressedReduce(compression), pinned_bytes)
        if self._buckets.device.type != "cpu":
            raise ConfigError(
                f"strict mode trains on the CPU, and the parameters are on {self._buckets.device}: kernels of other "
                f"devices add up in an order of their own"
            )
        self._rows = [self._buckets]
        self._repeated = RepeatedShards()
        self._batch: Batch | None = None  # the one that reduces
        self._loss_is_mean = loss_is_mean
        self._shown: ShownZeros | None = None
        self._is_audit = False  # the current shard is another rank's
        self._digests: dict[int, int] | None = None  # those of the current shard, if it is audited

    def begin(self, global_batch: GlobalBatch) -> None:
        """Begin a global batch."""
        assert global_batch.division is not None
        self._division = global_batch.division
        self._first, stop = self._division.ranges[global_batch.place]
        self._leaves = leaves(self._first, stop, self._division.shards)
        self._nodes = max(1, len(self._division.forests[global_batch.place]))
        while len(self._rows) < self._division.rows(global_batch.place):
            self._rows.append(Buckets(self.parameters))
            self._rows[-1].cut(self._buckets.least_bytes)
        self._index = 0  # the place of the current shard among this rank's; behind the last one, none or it is complete
        self._begun = 0  # the place of the current shard, also when it is complete
        self._filled: set[int] = set()  # parameters whose gradient of the current shard is taken
        # By parameter: gradients of the shard before to which those of the current one are added, and gradients of the
        # current one to which those of the next are added.
        self._waiting: dict[int, torch.Tensor] = {}
        self._next_waiting: dict[int, torch.Tensor] = {}
        self._waiting_at_begin = self._waiting  # when the current shard began; it may be reopened
        has_factor = self._loss_is_mean and global_batch.has_equal_shards
        # Of all shards, if they have the same one, and the user weighs none of them.
        self._factor = 1 / self._division.shards if has_factor else None
        self._repeated.begin(global_batch)
        audit = global_batch.audit
        # Digests of gradients, by parameter, of each audited shard.
        self._audited: dict[int, dict[int, int]]
        self._audited = {} if audit is None else {shard: {} for shard in _audited(audit, global_batch.place)}

    def _begin_writing(self) -> None:
        super()._begin_writing()
        self._rows[0] = self._buckets

    def begin_shard(self, batch: Batch) -> None:
        """Begin the shard of a batch, or a batch without one. The shards before it are complete."""
        self._is_audit = batch.is_audit
        self._digests = self._audited.get(batch.shard) if batch.samples else None
        if batch.is_audit:
            return  # it comes before all shards of this rank
        self._begun = len(self._leaves) if batch.shard < 0 else batch.shard - self._first
        self._close_shards(self._begun)
        self._waiting_at_begin = self._waiting

    def put(self, parameter: torch.Tensor, factor: float, adds: bool, is_final: bool = True) -> None:
        """Add `factor` times the parameter's `.grad` to the sums of the shards before it, as the tree requires."""
        if self._are_shown:  # before there is a reference to a view
            self._begin_writing()
        view = self._buckets.view(parameter)
        gradient = self._dense_gradient(parameter, view)
        if self._digests is not None:
            self._digests[id(parameter)] = digest_of([gradient])
        if self._index < len(self._leaves) and not self._is_audit:
            self._repeated.compare(self._first + self._index, parameter, gradient)
            if not self._filled and step.weight() is not None:
                self._factor = None
            self._put_leaf(parameter, gradient, factor)
            self._filled.add(id(parameter))
        if is_final:
            parameter.grad = None
        else:
            self._shown = self._shown or ShownZeros(self.parameters)
            self._shown.publish(parameter)

    def _put_leaf(self, parameter: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
        if self._are_shown:
            self._begin_writing()
        leaf, key = self._leaves[self._index], id(parameter)
        if not factor:
            gradient.zero_()  # not multiplied: a dummy batch's inf times 0 would be NaN
        elif self._common_factor(gradient.dtype) == 1.0:
            gradient.mul_(factor)  # rounded before the addition, as everywhere
        if leaf.waits:
            self._next_waiting[key] = gradient
            return
        waiting = [self._waiting[key]] if key in self._waiting else []
        rows = self._rows[leaf.row : leaf.row + leaf.summands - len(waiting)]
        summands = [row.view(parameter) for row in rows] + waiting
        result = self._rows[leaf.row].view(parameter)
        if not summands:
            result.copy_(gradient)
            return
        for summand in reversed(summands[1:]):
            gradient = torch.add(summand, gradient, out=gradient)
        torch.add(summands[0], gradient, out=result)

    def _common_factor(self, dtype: torch.dtype) -> float:
        """Return the factor by which the sum over all shards is multiplied; 1: each of them is multiplied by its own.
        It is the same on all ranks, and in every world."""
        return self._factor if self._factor and dtype in _MAY_BE_SUMMED_FIRST else 1.0

    def _close_shards(self, index: int) -> None:
        """Complete the shards before place `index`: zeros for the parameters without a gradient."""
        while self._index < index:
            if len(self._filled) < len(self.parameters):
                for parameter in self.parameters:
                    if id(parameter) not in self._filled:
                        self._put_leaf(parameter, torch.zeros_like(parameter, requires_grad=False), 0.0)
            self._index += 1
            self._filled.clear()
            self._waiting, self._next_waiting = self._next_waiting, {}

    def reopen_shard(self) -> None:
        """Drop the gradients of the current shard; the caller restores the sums of those before it."""
        self._filled.clear()
        self._waiting, self._next_waiting = self._waiting_at_begin, {}
        self._index = self._begun
        if self._digests is not None:
            self._digests.clear()

    def complete(self, filled: Collection[int], factor: float, is_kept: bool) -> None:
        """Complete all shards of this rank."""
        self._close_shards(len(self._leaves))
        self._repeated.refuse()

    def add_up(self, batch: Batch, own_weight: float) -> None:
        """Add up the shards of all ranks, and compare the results of those that are audited."""
        self._batch, global_batch = batch, batch.global_batch
        audited = (0, 0) if global_batch.audit is None else self._compared(global_batch.audit, global_batch.place)
        if own_weight >= 0:  # given where there was no backward pass
            self._factor = None
        headers = self.reduce(header_of(batch, self._digest, own_weight, audited))
        factor = conclude(headers, batch)
        if global_batch.audit is not None:
            own, again = [each.own_shard for each in headers], [each.other_shard for each in headers]
            SESSION.auditor.compare(global_batch, own, again)
        self.scale(factor)

    def _compared(self, audit: Audit, rank: int) -> tuple[int, int]:
        """Return the digests of this rank's audited shard, and of the one that it has computed again: of their
        gradients and running statistics. 0 for a shard without samples."""
        own, again = (self._digest_of(shard) for shard in _audited(audit, rank))
        return own, again

    def _digest_of(self, shard: int) -> int:
        found = self._audited.get(shard)
        if not found:
            return 0
        parts = [found.get(id(parameter), 0) for parameter in self.parameters] + [
            step.observer().digest_of_statistics(shard)
        ]
        packed = struct.pack(f"<{len(parts)}Q", *parts)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")

    def drop_shown(self) -> None:
        """Drop the zeros that code of the last loop body has seen as `.grad`: the next gradient must not be added to
        them, since a negative zero would become a positive one."""
        for parameter in self.parameters:
            parameter.grad = None
        if self._shown is not None:
            self._shown.restore()

    def _agree(self, here: World) -> None:
        refuse_others(here.transport)
        super()._agree(here)

    def memory(self) -> list[torch.Tensor]:
        return [flat for row in self._rows for flat in row.flats]

    def _all_reduce(self, transport: Transport, place: int, trailer: bytes) -> list[bytes]:
        if trailer and self._batch is not None:
            # Just before the last bucket: a thread may be reducing others until then, and more on one rank than on
            # another.
            step.observer().combine_shards(self._batch)
        rows = [row.buckets[place].flat for row in self._rows[: self._nodes]]
        return with_shards(transport).all_reduce_shards(
            rows, self._division, trailer, self._common_factor(rows[0].dtype)
        )

    def _cut(self, least_bytes: int) -> None:
        super()._cut(least_bytes)
        for row in self._rows[1:]:
            row.cut(least_bytes)


def _audited(audit: Audit, rank: int) -> tuple[int, int]:
    """Return this rank's audited shard, and the one that it computes again."""
    return audit.shards[rank], audit.again(rank)


class ShownZeros(Buckets):
    """Zeros that `.grad` shows after the backward pass of a loop body whose step() does nothing, so that code which
    inspects gradients, clips them or steps a GradScaler finds the expected values. Nothing is written for them, and as
    long as nobody else writes they need no memory: all their pages are one page of the kernel's."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, _unwritten_zeros)
        self._versions = [flat._version for flat in self.flats]

    def restore(self) -> None:
        """Zero what was written since."""
        for flat, version in zip(self.flats, self._versions, strict=True):
            if flat._version != version:
                flat.zero_()
        self._versions = [flat._version for flat in self.flats]


def _unwritten_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros in memory of their own, of which no page was written, where the system can give it."""
    nbytes = numel * dtype.itemsize
    if not (nbytes and hasattr(mmap, "MAP_ANONYMOUS")):
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)
