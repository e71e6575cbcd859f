"""Sum sparse tensors, as in gradients of embeddings: entries are gathered, not added up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.collectives.named.asynchronous import submit_gathering
from farandole.collectives.named.building import Call
from farandole.collectives.named.constants import Average
from farandole.collectives.named.handles import synchronize
from farandole.collectives.named.operation_requests import Kind
from farandole.collectives.named.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Compute the Sum or Average of a sparse COO tensor (same shape on all ranks, any number of entries).

    Returns:
        A function instead of a handle (as in Horovod): it waits, and returns a sparse tensor in which an index may
        occur several times.
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
