"""Farandole: elastic data-parallel training for PyTorch.

The public names are loaded when first used: the command line must start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole import elastic
    from farandole.collectives.agreement import any, mean
    from farandole.collectives.named import compression
    from farandole.collectives.named import objects as functions
    from farandole.collectives.named.asynchronous import (
        allgather_async,
        allreduce_async,
        allreduce_async_,
        alltoall_async,
        broadcast_async,
        broadcast_async_,
        grouped_allgather_async,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter_async,
        reducescatter_async,
    )
    from farandole.collectives.named.compression import Compression
    from farandole.collectives.named.handles import poll, synchronize
    from farandole.collectives.named.objects import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from farandole.collectives.named.operations import (
        allgather,
        allreduce,
        allreduce_,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        grouped_allgather,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_reducescatter,
        join,
        reducescatter,
        sparse_allreduce_async,
    )
    from farandole.collectives.named.process_sets import (
        ProcessSet,
        add_process_set,
        global_process_set,
        remove_process_set,
    )
    from farandole.collectives.named.settings import Adasum, Average, Max, Min, Product, Sum
    from farandole.collectives.named.sync_batch_norm import SyncBatchNorm
    from farandole.collectives.named.timeline import start_timeline, stop_timeline
    from farandole.errors import (
        FarandoleError,
        FatalError,
        HorovodInternalError,
        HostsUpdatedInterrupt,
        RecoverableError,
    )
    from farandole.launch.run_function import run
    from farandole.optim import distributed_optimizer as optimizer
    from farandole.optim.distributed_optimizer import DistributedOptimizer
    from farandole.optim.weighting import weight
    from farandole.parallel.data_parallel import DataParallel
    from farandole.worker.capabilities import (
        ccl_built,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rocm_built,
    )
    from farandole.worker.context import (
        cross_rank,
        cross_size,
        device,
        generation,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
        slot,
    )

__version__ = "0.1.0.dev0"

_HOMES = {
    "collectives.agreement": "any mean",
    "collectives.named.asynchronous": (
        "allgather_async allreduce_async allreduce_async_ alltoall_async broadcast_async "
        "broadcast_async_ grouped_allgather_async grouped_allreduce_async "
        "grouped_allreduce_async_ grouped_reducescatter_async reducescatter_async"
    ),
    "collectives.named.compression": "Compression",
    "collectives.named.handles": "poll synchronize",
    "collectives.named.objects": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "collectives.named.operations": (
        "allgather allreduce allreduce_ alltoall barrier broadcast broadcast_ grouped_allgather grouped_allreduce "
        "grouped_allreduce_ grouped_reducescatter join reducescatter sparse_allreduce_async"
    ),
    "collectives.named.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "collectives.named.settings": "Adasum Average Max Min Product Sum",
    "collectives.named.sync_batch_norm": "SyncBatchNorm",
    "collectives.named.timeline": "start_timeline stop_timeline",
    "errors": ("FarandoleError FatalError HorovodInternalError HostsUpdatedInterrupt RecoverableError"),
    "launch.run_function": "run",
    "optim.distributed_optimizer": "DistributedOptimizer",
    "optim.weighting": "weight",
    "parallel.data_parallel": "DataParallel",
    "worker.capabilities": (
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled "
        "mpi_threads_supported nccl_built rocm_built"
    ),
    "worker.context": (
        "cross_rank cross_size device generation init is_homogeneous is_initialized local_rank local_size rank "
        "shutdown size slot"
    ),
}
_MODULES = {
    "elastic": "farandole.elastic",
    "mpi_ops": "farandole",
    "functions": "farandole.collectives.named.objects",
    "compression": "farandole.collectives.named.compression",
    "optimizer": "farandole.optim.distributed_optimizer",
}
"""Modules by the names that scripts use, e.g. `hvd.mpi_ops.synchronize`."""

_HOME = {name: f"farandole.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DataParallel",
    "DistributedOptimizer",
    "FarandoleError",
    "FatalError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "RecoverableError",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "any",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "device",
    "elastic",
    "functions",
    "generation",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mean",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optimizer",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "slot",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "weight",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'farandole' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
