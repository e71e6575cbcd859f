"""Operations that gradients flow through, with Horovod's gradients. operations.py uses them.

Each takes the function that submits the operation, so that one class serves the plain and the grouped form. The
backward pass is a collective too: all ranks run it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.collectives.named import asynchronous
from farandole.collectives.named.handles import Handle
from farandole.collectives.named.process_sets import ProcessSet, engine
from farandole.collectives.transport import Reduction

Submit = Callable[[Sequence[torch.Tensor]], Handle]
"""Submits tensors to the plain or the grouped form of an operation."""


def all_reduce(
    submit: Submit, tensors: Sequence[torch.Tensor], op: Reduction, scales: tuple[float, float], members: ProcessSet
) -> tuple[torch.Tensor, ...]:
    """Reduce the tensors. The gradient is reduced as the tensor was."""
    return _apply(_AllReduce, submit, tensors, op, scales, members)


def all_gather(submit: Submit, tensors: Sequence[torch.Tensor], members: ProcessSet) -> tuple[torch.Tensor, ...]:
    """Gather the tensors. The gradient is the average over all ranks of the part that belongs to this rank's rows."""
    return _apply(_AllGather, submit, tensors, members)


def broadcast(submit: Submit, tensor: torch.Tensor, root_rank: int, members: ProcessSet) -> torch.Tensor:
    """Broadcast the tensor. The root's gradient is the average over all ranks; that of the others is zero."""
    return _apply(_Broadcast, submit, [tensor], root_rank, members)[0]


def all_to_all(submit: Submit, tensor: torch.Tensor, members: ProcessSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange rows. The rows of the gradient go back to the ranks that the tensor's rows came from."""
    output, received = _AllToAll.apply(submit, members, tensor)  # type: ignore[no-untyped-call]
    return output, received


def reduce_scatter(
    submit: Submit, tensors: Sequence[torch.Tensor], op: Reduction, scales: tuple[float, float], members: ProcessSet
) -> tuple[torch.Tensor, ...]:
    """Reduce and scatter. The gradient gathers the rows of all, times the number of ranks for a Sum (as in Horovod)."""
    return _apply(_ReduceScatter, submit, tensors, op, scales, members)


def _apply(function: Any, submit: Submit, tensors: Sequence[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, ...]:
    """Apply the function through autograd where gradients are recorded."""
    # `submit` refuses arguments that are not tensors.
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        results: tuple[torch.Tensor, ...] = function.apply(submit, *rest, *tensors)
        return results
    return _take(submit(tensors))


def _take(handle: Handle) -> tuple[torch.Tensor, ...]:
    """Return the result as a tuple, also for a plain operation."""
    result = handle.take()
    return result if isinstance(result, tuple) else (result,)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        submit: Submit,
        op: Reduction,
        scales: tuple[float, float],
        members: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.rest = op, scales, members
        return _take(submit(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op, (prescale, postscale), members = ctx.rest
        handle = asynchronous.grouped_allreduce_async(gradients, None, None, op, prescale, postscale, members)
        return (None, None, None, None, *handle.take())


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, submit: Submit, members: ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        handle = submit(tensors)
        results = _take(handle)
        ctx.members, ctx.shapes, ctx.received = members, [tensor.shape for tensor in tensors], handle.received
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = asynchronous.grouped_allreduce_async(gradients, op=Reduction.AVERAGE, process_set=ctx.members)
        place = ctx.members.rank()
        mine = [
            average.split(rows)[place].view(shape)
            for average, rows, shape in zip(handle.take(), ctx.received, ctx.shapes, strict=True)
        ]
        return (None, None, *mine)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, submit: Submit, root_rank: int, members: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.root_rank, ctx.members = root_rank, members
        return _take(submit([tensor]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = asynchronous.allreduce_async(gradients[0], op=Reduction.AVERAGE, process_set=ctx.members)
        average = handle.take()
        return None, None, None, average if engine().rank == ctx.root_rank else torch.zeros_like(average)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, submit: Submit, members: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = submit([tensor]).take()
        ctx.members, ctx.received, ctx.rows = members, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = asynchronous.alltoall_async(gradients[0], ctx.received, process_set=ctx.members)
        back, _ = handle.take()
        kept = back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])  # rows that no rank received
        return None, None, torch.cat([back, kept])


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        submit: Submit,
        op: Reduction,
        scales: tuple[float, float],
        members: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.members, ctx.factor = members, scales[0] * scales[1]
        if op is Reduction.SUM:
            ctx.factor *= members.size()
        return _take(submit(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        scaled = [gradient * ctx.factor for gradient in gradients]
        handle = asynchronous.grouped_allgather_async(scaled, process_set=ctx.members)
        return (None, None, None, None, *handle.take())
