"""Horovod's operations that return a handle at once. operations.py has those that wait.

The names and the order of the arguments are Horovod's.

All of them may be called from any thread, and in any order on different ranks: operations are matched by their name,
unnamed ones by their running number. Tensors may lie on any device and need not be contiguous; they must not be changed
before the handle is synchronized.

Args:
    tensor: Of any shape, int32, int64, float16, bfloat16, float32, float64 or bool; any dtype where nothing is reduced.
    average: Deprecated: True for op=Average, False for op=Sum.
    op: Average (if None), Sum, Min, Max, Product or Adasum. The average of integers is truncated toward zero.
    prescale_factor, postscale_factor: Factors of the tensor before and after the reduction.
    process_set: The ranks that take part.

Raises:
    ValueError: The arguments are invalid, the name is in flight already, or the process set lacks this rank.
    NotInitialized: Called before init().

They also raise the error that ended the generation, when it has ended. synchronize() raises later errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.integrations.horovod.named.calls import (
    Call,
    reduction,
    submit_broadcast,
    submit_exchange,
    submit_gathering,
    submit_reduction,
)
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.stages import Kind
from farandole.integrations.horovod.named.tensor_queue import Handle
from farandole.training.collectives.transport import Reduction


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce `tensor` into a new one.

    See the example of `synchronize`.

    Args:
        tensor: The same shape and dtype on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    call = Call(Kind.ALLREDUCE, name, process_set)
    return submit_reduction(call, [tensor], reduction(op, average), prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce `tensor` in place. After an error its content is undefined.

    See the example of `synchronize`.

    Args:
        tensor: The same shape and dtype on all ranks.
        average: Horovod's older choice between Average (True) and Sum (False); not together with `op`.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Average, Sum, Min, Max, Product or Adasum; Average unless given. The same on all ranks.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    call = Call(Kind.ALLREDUCE, name, process_set)
    return submit_reduction(call, [tensor], reduction(op, average), prescale_factor, postscale_factor, in_place=True)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors (all on one device) into new ones: all of them together, or none.

    See the example of `synchronize`.

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
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors in place.

    See the example of `synchronize`.

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
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    call = Call(Kind.ALLREDUCE, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op, average), prescale_factor, postscale_factor, in_place=True)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather the rows of all ranks' tensors, in the order of the ranks.

    See the example of `synchronize`.

    Args:
        tensor: Only the number of rows may differ among ranks (0 is allowed); a scalar counts as one row.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    return submit_gathering(Call(Kind.ALLGATHER, name, process_set), [tensor])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather the rows of several tensors, all of them together or none.

    See the example of `synchronize`.

    Args:
        tensors: The tensors of this rank; only the numbers of their rows may differ among ranks.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    return submit_gathering(Call(Kind.ALLGATHER, name, process_set, tensors), tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Copy the tensor of `root_rank` into a new one.

    See the example of `synchronize`.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: A global rank, also in a process set.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    return submit_broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Overwrite `tensor` with that of `root_rank`.

    See the example of `synchronize`.

    Args:
        tensor: The same shape and dtype on all ranks.
        root_rank: A global rank, also in a process set.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    return submit_broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send some rows to each rank, and receive some rows from each.

    See the example of `synchronize`.

    Args:
        tensor: The rows for all ranks; the first ones go to rank 0.
        splits: The number of rows for each rank; None to split them evenly.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle; synchronize() returns (tensor, rows received from each rank: int32, on the device of `splits`).

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    return submit_exchange(Call(Kind.ALLTOALL, name, process_set), tensor, splits)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce `tensor` by Sum or Average; this rank gets its part of the rows.

    The first ranks get one more where the rows cannot be divided evenly.

    See the example of `synchronize`.

    Args:
        tensor: The same shape and dtype on all ranks, with at least one dimension.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Sum or Average; the same on all ranks.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    call = Call(Kind.REDUCESCATTER, name, process_set)
    return submit_reduction(call, [tensor], reduction(op), prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce several tensors and scatter the rows of each, all of them together or none.

    See the example of `synchronize`.

    Args:
        tensors: The tensors of this rank, in the same order and with the same shapes and dtypes on all ranks.
        name: The name by which ranks match the operation; None: a running number, so that ranks make unnamed calls
            in the same order.
        op: Sum or Average; the same on all ranks.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Factor on each rank's tensor, before the reduction.
        postscale_factor: Factor on the result.

    Returns:
        A handle for synchronize() and poll().

    Raises:
        ValueError: An argument is invalid on this rank: a dtype that cannot be reduced, the name, the process set.
        NotInitialized: `init()` was not called. Other errors are those of synchronize().
    """
    call = Call(Kind.REDUCESCATTER, name, process_set, tensors)
    return submit_reduction(call, tensors, reduction(op), prescale_factor, postscale_factor)
