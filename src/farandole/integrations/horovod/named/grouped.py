"""Several tensors in one operation, all of them together or none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.integrations.horovod.named.calls import Call, reduction, submit_gathering, submit_reduction
from farandole.integrations.horovod.named.differentiable import (
    AllGather,
    AllReduce,
    ReduceScatter,
    differentiable,
    reduce,
)
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.stages import Kind
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.compression import Compression, Compressor


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
    """Reduce several tensors (all on one device) into new ones. Gradients flow through it.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.grouped_allreduce([torch.ones(2), torch.zeros(1)], name="both")
        [tensor([1., 1.]), tensor([0.])]
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(AllReduce, call, tensors, compression, reduction(op, average), scales)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place.

    See the example of `grouped_allreduce`.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        `tensors`, as a tuple. After an error their contents are undefined.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors, is_awaited=True)
    handle = submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor, in_place=True)
    results: tuple[torch.Tensor, ...] = handle.take()
    return results


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gather the rows of several tensors from all ranks. Gradients flow through it.

    See the example of `allgather`.

    Args:
        tensors: The tensors of this rank; only the numbers of their rows may differ among ranks.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.ALLGATHER, name, process_set, tensors, is_awaited=True)
    return differentiable(AllGather, lambda inputs: submit_gathering(call, inputs), tensors, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, and keep this rank's rows of each. Gradients flow through it.

    See the example of `reducescatter`.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        compression: Converts tensors for the reduction, and the results back: a member of `Compression`.
        op: Sum or Average; the same on all ranks.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.

    Returns:
        The rows of this rank of each tensor.

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors, is_awaited=True)
    scales = prescale_factor, postscale_factor
    return reduce(ReduceScatter, call, tensors, compression, reduction(op), scales)
