"""The operations, where scripts look for them: `from horovod.torch.mpi_ops import synchronize`."""

from __future__ import annotations

from horovod.common.basics import HorovodBasics
from horovod.torch import _lazy

_basics = HorovodBasics()

__getattr__, __all__ = _lazy.names(
    __name__,
    {
        "farandole.collectives.named.operations": (
            "allgather",
            "allgather_async",
            "allreduce",
            "allreduce_",
            "allreduce_async",
            "allreduce_async_",
            "alltoall",
            "alltoall_async",
            "barrier",
            "broadcast",
            "broadcast_",
            "broadcast_async",
            "broadcast_async_",
            "grouped_allgather",
            "grouped_allgather_async",
            "grouped_allreduce",
            "grouped_allreduce_",
            "grouped_allreduce_async",
            "grouped_allreduce_async_",
            "grouped_reducescatter",
            "grouped_reducescatter_async",
            "join",
            "poll",
            "reducescatter",
            "reducescatter_async",
            "sparse_allreduce_async",
            "synchronize",
        ),
        "farandole.collectives.named.constants": ("Adasum", "Average", "Max", "Min", "Product", "Sum"),
        "farandole.collectives.named.process_sets": (
            "ProcessSet",
            "add_process_set",
            "global_process_set",
            "remove_process_set",
        ),
        "farandole.errors": ("HorovodInternalError",),
        "farandole.worker.context": (
            "cross_rank",
            "cross_size",
            "init",
            "is_initialized",
            "local_rank",
            "local_size",
            "rank",
            "shutdown",
            "size",
        ),
        "farandole": (
            "ccl_built",
            "cuda_built",
            "ddl_built",
            "gloo_built",
            "gloo_enabled",
            "mpi_built",
            "mpi_enabled",
            "mpi_threads_supported",
            "nccl_built",
            "rocm_built",
            "start_timeline",
            "stop_timeline",
        ),
        "farandole.collectives.named.compression": ("Compression",),
    },
)
