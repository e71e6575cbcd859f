"""Sparse tensors, as in gradients of embeddings: entries are gathered, not added up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.integrations.horovod.named.calls import Call, submit_gathering
from farandole.integrations.horovod.named.negotiation import Average
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.stages import Kind
from farandole.integrations.horovod.named.tensor_queue import synchronize


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Compute the Sum or Average of a sparse COO tensor (same shape on all ranks, any number of entries).

    Args:
        tensor: A sparse COO tensor, of the same shape and dtype on all ranks, with any number of entries.
        name: The name by which ranks match the operation; None: a running number.
        op: Sum or Average.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A function instead of a handle, as in Horovod: it waits, and returns a sparse tensor in which an index may
        occur several times.

    Raises:
        ValueError: An argument is invalid on this rank.
        NotInitialized: `init()` was not called. The returned function raises what synchronize() raises.

    Examples:
        >>> wait = fd.sparse_allreduce_async(torch.eye(2).to_sparse(), "eye", fd.Sum)
        >>> wait().to_dense()
        tensor([[1., 0.],
                [0., 1.]])
    """
    calls = [
        Call(Kind.ALLGATHER, None if name is None else f"{name}.{part}", process_set) for part in ("indices", "values")
    ]
    indices = submit_gathering(calls[0], [tensor._indices().transpose(0, 1)])
    values = submit_gathering(calls[1], [tensor._values()])

    def wait() -> torch.Tensor:
        # Wait for both before an error is raised: their names are free again afterwards.
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        # Given explicitly, or torch warns of its default.
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.shape, check_invariants=False)

    return wait
