"""Several tensors in one operation, all of them together or none: the grouped functions that wait.

Arguments as in asynchronous.py; compression is applied to each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.collectives.named import asynchronous, autograd
from farandole.collectives.named.asynchronous import reduction
from farandole.collectives.named.compression import Compression, Compressor
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
    """Reduce several tensors into new ones. Gradients flow through it."""
    scales = (prescale_factor, postscale_factor)
    how = reduction(op, average)
    small, contexts = _compress(tensors, compression)
    results = autograd.all_reduce(
        lambda inputs: asynchronous.grouped_allreduce_async(inputs, None, name, how, *scales, process_set),
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
    how = reduction(op, average)
    handle = asynchronous.grouped_allreduce_async_(
        tensors, None, name, how, prescale_factor, postscale_factor, process_set
    )
    results: tuple[torch.Tensor, ...] = handle.take()
    return results


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """The rows of several tensors from all ranks. Gradients flow through it."""
    return autograd.all_gather(
        lambda inputs: asynchronous.grouped_allgather_async(inputs, name, process_set), tensors, process_set
    )


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
    scales = (prescale_factor, postscale_factor)
    how = reduction(op)
    small, contexts = _compress(tensors, compression)
    results = autograd.reduce_scatter(
        lambda inputs: asynchronous.grouped_reducescatter_async(inputs, name, how, process_set, *scales),
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
