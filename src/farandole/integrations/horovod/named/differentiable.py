"""Gradients of the operations, as in Horovod. The backward pass is a collective, too: all ranks run it, in the same
order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from farandole.integrations.horovod.named.asynchronous import (
    allreduce_async,
    alltoall_async,
    grouped_allgather_async,
    grouped_allreduce_async,
)
from farandole.integrations.horovod.named.calls import Call, submit_reduction
from farandole.integrations.horovod.named.engine import engine
from farandole.integrations.horovod.named.process_sets import ProcessSet
from farandole.integrations.horovod.named.tensor_queue import Handle
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.compression import Compressor

Submit: TypeAlias = Callable[[Sequence[torch.Tensor]], Handle]
"""Submits tensors to the plain or the grouped form of an operation."""


def reduce(
    function: type[torch.autograd.Function],
    call: Call,
    tensors: Sequence[torch.Tensor],
    compression: Compressor,
    op: Reduction,
    scales: tuple[float, float],
) -> list[torch.Tensor]:
    """Compress the tensors, reduce them as `call`, and decompress the results."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = differentiable(
        function,
        lambda inputs: submit_reduction(call, inputs, op, *scales),
        [tensor for tensor, _ in compressed],
        op,
        scales,
        call.process_set,
    )
    return [compression.decompress(each, context) for each, (_, context) in zip(results, compressed, strict=True)]


def differentiable(
    function: type[torch.autograd.Function], submit: Submit, tensors: Sequence[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Submit the tensors and wait; through `function` where gradients are recorded."""
    # `submit` refuses arguments that are not tensors.
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        results: tuple[torch.Tensor, ...] = function.apply(submit, *rest, *tensors)  # type: ignore[no-untyped-call]
        return results
    return _take(submit(tensors))


def _take(handle: Handle) -> tuple[torch.Tensor, ...]:
    """Return the result as a tuple, also for a plain operation."""
    result = handle.take()
    return result if isinstance(result, tuple) else (result,)


class AllReduce(torch.autograd.Function):
    """The gradient is reduced as the tensor was."""

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
        handle = grouped_allreduce_async(gradients, None, None, op, prescale, postscale, members)
        return (None, None, None, None, *handle.take())


class AllGather(torch.autograd.Function):
    """The gradient is the average over all ranks of the part that belongs to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, submit: Submit, members: ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        handle = submit(tensors)
        results = _take(handle)
        ctx.members, ctx.shapes, ctx.received = members, [tensor.shape for tensor in tensors], handle.received
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = grouped_allreduce_async(gradients, op=Reduction.AVERAGE, process_set=ctx.members)
        place = ctx.members.rank()
        mine = [
            average.split(rows)[place].view(shape)
            for average, rows, shape in zip(handle.take(), ctx.received, ctx.shapes, strict=True)
        ]
        return (None, None, *mine)


class Broadcast(torch.autograd.Function):
    """The root's gradient is the average over all ranks; that of the others is zero."""

    @staticmethod
    def forward(
        ctx: Any, submit: Submit, root_rank: int, members: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.root_rank, ctx.members = root_rank, members
        return _take(submit([tensor]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        handle = allreduce_async(gradients[0], op=Reduction.AVERAGE, process_set=ctx.members)
        average = handle.take()
        return None, None, None, average if engine().rank == ctx.root_rank else torch.zeros_like(average)


class AllToAll(torch.autograd.Function):
    """The rows of the gradient go back to the ranks that the tensor's rows came from."""

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
        handle = alltoall_async(gradients[0], ctx.received, process_set=ctx.members)
        back, _ = handle.take()
        kept = back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])  # rows that no rank received
        return None, None, torch.cat([back, kept])


class ReduceScatter(torch.autograd.Function):
    """The gradient gathers the rows of all, times the number of ranks for a Sum, as in Horovod."""

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
        handle = grouped_allgather_async(scaled, process_set=ctx.members)
        return (None, None, None, None, *handle.take())
