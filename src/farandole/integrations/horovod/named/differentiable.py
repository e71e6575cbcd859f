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
from farandole.integrations.horovod.named.stages import Kind
from farandole.integrations.horovod.named.tensor_queue import Handle
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.compression import Compressor

Submit: TypeAlias = Callable[[Sequence[torch.Tensor]], Handle]
"""Submits tensors to the plain or the grouped form of an operation."""

Gradient: TypeAlias = Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Returns the gradients of an operation's tensors, given its context and the gradients of its results."""


def reduce(
    call: Call, tensors: Sequence[torch.Tensor], compression: Compressor, op: Reduction, scales: tuple[float, float]
) -> list[torch.Tensor]:
    """Compress the tensors, reduce them as `call`, and decompress the results."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    gradient = reduced_gradient if call.kind is Kind.ALLREDUCE else gathered_gradient
    results = differentiable(
        lambda inputs: submit_reduction(call, inputs, op, *scales),
        [tensor for tensor, _ in compressed],
        gradient(op, scales, call.process_set),
    )
    return [compression.decompress(each, context) for each, (_, context) in zip(results, compressed, strict=True)]


def differentiable(submit: Submit, tensors: Sequence[torch.Tensor], gradient: Gradient) -> tuple[torch.Tensor, ...]:
    """Submit the tensors and wait; with a node in the graph where gradients are recorded."""
    # `submit` refuses arguments that are not tensors.
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        results: tuple[torch.Tensor, ...] = _Operation.apply(submit, gradient, *tensors)  # type: ignore[no-untyped-call]
        return results
    return _take(submit(tensors))


def _take(handle: Handle) -> tuple[torch.Tensor, ...]:
    """Return the result as a tuple, also for a plain operation."""
    result = handle.take()
    return result if isinstance(result, tuple) else (result,)


class _Operation(torch.autograd.Function):
    """The node of an operation.

    received  for each tensor of an allgather or alltoall, the number of rows from each rank
    """

    @staticmethod
    def forward(ctx: Any, submit: Submit, gradient: Gradient, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        handle = submit(tensors)
        results = _take(handle)
        ctx.gradient, ctx.received, ctx.shapes = gradient, handle.received, [tensor.shape for tensor in tensors]
        ctx.mark_non_differentiable(*results[len(tensors) :])  # the counts of an alltoall
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.gradient(ctx, gradients))


def reduced_gradient(op: Reduction, scales: tuple[float, float], members: ProcessSet) -> Gradient:
    """Return the gradient of an allreduce, which is reduced as the tensors were."""

    def gradient(_: Any, gradients: Sequence[torch.Tensor]) -> Any:
        return grouped_allreduce_async(gradients, None, None, op, *scales, members).take()

    return gradient


def gathered_gradient(op: Reduction, scales: tuple[float, float], members: ProcessSet) -> Gradient:
    """Return the gradient of a reducescatter: the rows of all ranks, times their number for a Sum, as in Horovod."""

    factor = scales[0] * scales[1]
    if op is Reduction.SUM:
        factor *= members.size() or 1

    def gradient(_: Any, gradients: Sequence[torch.Tensor]) -> Any:
        return grouped_allgather_async([each * factor for each in gradients], process_set=members).take()

    return gradient


def own_rows_gradient(members: ProcessSet) -> Gradient:
    """Return the gradient of an allgather: the average over all ranks of the part that belongs to this rank's rows."""

    def gradient(ctx: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handle = grouped_allreduce_async(gradients, op=Reduction.AVERAGE, process_set=members)
        place = members.rank()
        return [
            average.split(rows)[place].view(shape)
            for average, rows, shape in zip(handle.take(), ctx.received, ctx.shapes, strict=True)
        ]

    return gradient


def root_gradient(root_rank: int, members: ProcessSet) -> Gradient:
    """Return the gradient of a broadcast: the average over all ranks for the root, zero for the others."""

    def gradient(_: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        average = allreduce_async(gradients[0], op=Reduction.AVERAGE, process_set=members).take()
        return [average if engine().rank == root_rank else torch.zeros_like(average)]

    return gradient


def returned_gradient(members: ProcessSet) -> Gradient:
    """Return the gradient of an alltoall, whose rows go back to the ranks that the tensor's rows came from."""

    def gradient(ctx: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        back, _ = alltoall_async(gradients[0], ctx.received[0], process_set=members).take()
        kept = back.new_zeros(ctx.shapes[0][0] - back.shape[0], *back.shape[1:])  # rows that no rank received
        return [torch.cat([back, kept])]

    return gradient
