"""Several tensors in one operation, all of them together or none: the grouped functions that wait.

Arguments as in asynchronous.py; compression is applied to each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.collectives.named import autograd
from farandole.collectives.named.asynchronous import reduction, submit_gathering, submit_reduction
from farandole.collectives.named.building import Call
from farandole.collectives.named.compression import Compression, Compressor
from farandole.collectives.named.operation_requests import Kind
from farandole.collectives.named.process_sets import ProcessSet, global_process_set
from farandole.collectives.reduction import Reduction


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors (all on one device) into new ones. Gradients flow through it."""
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    how, scales = reduction(op, average), (prescale_factor, postscale_factor)
    small, contexts = _compress(tensors, compression)
    results = autograd.all_reduce(
        lambda inputs: submit_reduction(call, inputs, how, *scales),
        small,
        how,
        scales,
        process_set,
    )
    return [compression.decompress(each, context) for each, context in zip(results, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place."""
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    how = reduction(op, average)
    results: tuple[torch.Tensor, ...] = submit_reduction(
        call, tensors, how, prescale_factor, postscale_factor, in_place=True
    ).take()
    return results


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gather the rows of several tensors from all ranks. Gradients flow through it."""
    call = Call(Kind.ALLGATHER, name, process_set, tensors)
    return autograd.all_gather(lambda inputs: submit_gathering(call, inputs), tensors, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, and keep this rank's rows of each. Gradients flow through it."""
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors)
    how, scales = reduction(op), (prescale_factor, postscale_factor)
    small, contexts = _compress(tensors, compression)
    results = autograd.reduce_scatter(
        lambda inputs: submit_reduction(call, inputs, how, *scales),
        small,
        how,
        scales,
        process_set,
    )
    return [compression.decompress(each, context) for each, context in zip(results, contexts, strict=True)]


def _compress(
    tensors: Sequence[torch.Tensor], compression: Compressor
) -> tuple[Sequence[torch.Tensor], Sequence[object]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]
