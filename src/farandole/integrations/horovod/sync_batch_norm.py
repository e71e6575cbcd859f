"""BatchNorm over the batches of all ranks together, forward and backward. Models use it in place of BatchNorm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from farandole.errors import StepError
from farandole.integrations.horovod.named.negotiation import Sum
from farandole.integrations.horovod.named.operations import allgather, allreduce
from farandole.training.collectives import world
from farandole.training.state import step


class SyncBatchNorm(_BatchNorm):
    """Equals torch.nn.BatchNorm1d, 2d and 3d on one process with the global batch; local batches may differ in size.

    In a loop over a loader of Farandole, the gradients of the ranks are weighted as their losses are, by samples or by
    fd.weight(), and a dummy batch does not count. Elsewhere all ranks count alike, as in Horovod.

    Gradients of weight and bias are this rank's part; a DistributedOptimizer adds the others'. All ranks must run the
    same layers in the same order. Statistics are computed over the ranks in float64.

    Args:
        num_features: Channels C of inputs (N, C, ...), on the CPU or a CUDA device.
        momentum: None: running statistics are the plain average over all batches.
        eps: As in torch.nn.BatchNorm1d.
        affine: As in torch.nn.BatchNorm1d.
        track_running_stats: As in torch.nn.BatchNorm1d.

    Raises:
        StepError: By backward() on all workers, where fd.weight(0) was called on one that has samples.
        ValueError: An input has less than two dimensions, or a global batch less than two values for each channel.

    Examples:
        >>> layer = fd.SyncBatchNorm(8)
        >>> layer(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        factor = self._count_batch()
        uses_batch = self.training or self.running_mean is None
        running = (self.running_mean, self.running_var) if self.training or not uses_batch else (None, None)
        if not uses_batch or world.current().placement.size == 1:
            return F.batch_norm(input, *running, self.weight, self.bias, uses_batch, factor, self.eps)
        normalized, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (count / (count - 1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return normalized  # type: ignore[no-any-return]

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) takes inputs of shape (N, {self.num_features}, ...), got "
                f"{tuple(input.shape)}"
            )

    def _count_batch(self) -> float:
        """Return the weight of this batch in the running statistics."""
        if not self.training or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalize(torch.autograd.Function):
    """Map (input, weight, bias, eps) to (normalized input, global mean, biased variance, values per channel)."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, count = _global_statistics(x, _is_counted())
        if count < 2:
            raise ValueError(
                f"SyncBatchNorm needs more than one value for each channel in the global batch when training, got "
                f"{count:.0f}; its input here has shape {tuple(input.shape)}"
            )
        centre, scale = mean.to(x.dtype), torch.rsqrt(variance + eps).to(x.dtype)
        ctx.save_for_backward(input, weight, centre, scale)
        ctx.count = count
        normalized = (x - _spread(centre, x)) * _spread(scale, x)
        if weight is not None:
            normalized = normalized * _spread(weight.to(x.dtype), x)
        if bias is not None:
            normalized = normalized + _spread(bias.to(x.dtype), x)
        ctx.mark_non_differentiable(mean, variance)
        return normalized.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, centre, scale = ctx.saved_tensors
        dy = gradient.to(scale.dtype)
        x_hat = (x.to(scale.dtype) - _spread(centre, dy)) * _spread(scale, dy)
        sums = torch.stack([_per_channel_sum(dy), _per_channel_sum(dy * x_hat)])
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_weight = sums[1].to(weight.dtype) if needs_weight else None
        grad_bias = sums[0].to(weight.dtype) if needs_bias else None
        grad_input = None
        if needs_input:
            # Each rank's gradient is that of its own loss, and counts in the step by its share. What the other ranks'
            # losses add to it is divided by that share, which it is multiplied by later.
            share = step.share()
            ours = torch.cat([sums.flatten() * share, sums.new_tensor([_is_counted() and not share])])
            of_all = allreduce(ours, name="sync_batch_norm.gradients", op=Sum)
            if of_all[-1]:
                raise StepError(
                    "weight(0) with SyncBatchNorm, on a worker with samples of the global batch: the gradients that "
                    "the losses of other workers have by its samples would be lost. Give it a small weight instead"
                )
            mean_dy, mean_dy_x_hat = of_all[:-1].view_as(sums) / (ctx.count * share or math.inf)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            grad_input = dy - _spread(mean_dy.to(dy.dtype), dy) - x_hat * _spread(mean_dy_x_hat.to(dy.dtype), dy)
            grad_input = (grad_input * _spread(factor, dy)).to(x.dtype)
        return grad_input, grad_weight, grad_bias, None


def _is_counted() -> bool:
    """Return whether this rank's values count: not in a dummy batch, whose samples are those of another rank."""
    batch = step.batch()
    return batch is None or not batch.is_dummy


def _global_statistics(x: torch.Tensor, is_counted: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean, biased variance (both float64, one value for each channel) and values per channel over all ranks.
    `is_counted`: this rank's values count; where none does, as in padding, all do. Computed from each rank's mean and
    squared distances to it, so that nothing cancels for large means."""
    count = x.numel() // x.size(1)
    mean = _per_channel_sum(x) / max(count, 1)
    centre = mean.to(x.dtype)  # an approximate mean is enough, since its error is subtracted again
    spread = _per_channel_sum((x - _spread(centre, x)).square_()) - count * (mean - centre).square()
    ours = torch.cat([mean.new_tensor([count, count * is_counted]), mean, spread])
    by_rank = allgather(ours.unsqueeze(0), "sync_batch_norm.statistics")
    all_counts, counts, means, spreads = torch.split(by_rank, [1, 1, len(mean), len(mean)], dim=1)
    counts, spreads = (counts, spreads * (counts > 0)) if bool(counts.any()) else (all_counts, spreads)
    total = counts.sum()
    global_mean = (counts * means).sum(0) / total
    squares = (spreads + counts * (means - global_mean).square()).sum(0)
    return global_mean, squares / total, float(total)


def _per_channel_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum([dim for dim in range(x.dim()) if dim != 1], dtype=torch.float64)


def _spread(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one value for each channel in a shape that broadcasts against (N, C, ...)."""
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))
