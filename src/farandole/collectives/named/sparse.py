"""The sum of sparse tensors, as in gradients of embeddings: entries are gathered, not added up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.collectives.named.asynchronous import allgather_async
from farandole.collectives.named.constants import Average
from farandole.collectives.named.handles import synchronize
from farandole.collectives.named.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Sum or Average of a sparse COO tensor (same shape on all ranks, any number of entries).

    Returns a function instead of a handle (as Horovod does): it waits, and gives a sparse tensor in which an
    index may occur several times.
    """
    prefix = None if name is None else f"{name}."
    indices = allgather_async(
        tensor._indices().transpose(0, 1), None if prefix is None else f"{prefix}indices", process_set
    )
    values = allgather_async(tensor._values(), None if prefix is None else f"{prefix}values", process_set)

    def wait() -> torch.Tensor:
        # Both, before anything is raised: their names are free again afterwards.
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        # Said explicitly, or torch warns of its default.
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.shape, check_invariants=False)

    return wait
