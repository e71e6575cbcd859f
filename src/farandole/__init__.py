"""Farandole: elastic data-parallel training for PyTorch.

The public names are loaded when first used: the command line must start without torch. Type checkers read the imports
below, in which `X as X` marks a public name; Python reads _HOMES. A test compares the two.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole import elastic as elastic
    from farandole.errors import (
        FarandoleError as FarandoleError,
        FatalError as FatalError,
        HorovodInternalError as HorovodInternalError,
        HostsUpdatedInterrupt as HostsUpdatedInterrupt,
        RecoverableError as RecoverableError,
    )
    from farandole.integrations.data_parallel.data_parallel import DataParallel as DataParallel
    from farandole.integrations.horovod.named import objects
    from farandole.integrations.horovod.named.asynchronous import (
        allgather_async as allgather_async,
        allreduce_async as allreduce_async,
        allreduce_async_ as allreduce_async_,
        alltoall_async as alltoall_async,
        broadcast_async as broadcast_async,
        broadcast_async_ as broadcast_async_,
        grouped_allgather_async as grouped_allgather_async,
        grouped_allreduce_async as grouped_allreduce_async,
        grouped_allreduce_async_ as grouped_allreduce_async_,
        grouped_reducescatter_async as grouped_reducescatter_async,
        reducescatter_async as reducescatter_async,
        sparse_allreduce_async as sparse_allreduce_async,
    )
    from farandole.integrations.horovod.named.negotiation import (
        Adasum as Adasum,
        Average as Average,
        Max as Max,
        Min as Min,
        Product as Product,
        Sum as Sum,
    )
    from farandole.integrations.horovod.named.objects import (
        allgather_object as allgather_object,
        broadcast_object as broadcast_object,
        broadcast_optimizer_state as broadcast_optimizer_state,
        broadcast_parameters as broadcast_parameters,
    )
    from farandole.integrations.horovod.named.operations import (
        allgather as allgather,
        allreduce as allreduce,
        allreduce_ as allreduce_,
        alltoall as alltoall,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_ as broadcast_,
        grouped_allgather as grouped_allgather,
        grouped_allreduce as grouped_allreduce,
        grouped_allreduce_ as grouped_allreduce_,
        grouped_reducescatter as grouped_reducescatter,
        join as join,
        reducescatter as reducescatter,
    )
    from farandole.integrations.horovod.named.process_sets import (
        ProcessSet as ProcessSet,
        add_process_set as add_process_set,
        global_process_set as global_process_set,
        remove_process_set as remove_process_set,
    )
    from farandole.integrations.horovod.named.tensor_queue import poll as poll, synchronize as synchronize
    from farandole.integrations.horovod.named.timeline import (
        start_timeline as start_timeline,
        stop_timeline as stop_timeline,
    )
    from farandole.integrations.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from farandole.job.launch.run_function import run as run
    from farandole.training.collectives.agreement import any as any, mean as mean
    from farandole.training.optim import compression as compression, distributed_optimizer
    from farandole.training.optim.compression import Compression as Compression
    from farandole.training.optim.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from farandole.training.optim.step_agreement import weight as weight
    from farandole.training.worker.capabilities import (
        ccl_built as ccl_built,
        cuda_built as cuda_built,
        ddl_built as ddl_built,
        gloo_built as gloo_built,
        gloo_enabled as gloo_enabled,
        mpi_built as mpi_built,
        mpi_enabled as mpi_enabled,
        mpi_threads_supported as mpi_threads_supported,
        nccl_built as nccl_built,
        rocm_built as rocm_built,
    )
    from farandole.training.worker.context import (
        cross_rank as cross_rank,
        cross_size as cross_size,
        device as device,
        generation as generation,
        init as init,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        rank as rank,
        shutdown as shutdown,
        size as size,
        slot as slot,
    )

    functions, optimizer = objects, distributed_optimizer

__version__ = "0.1.0.dev0"

_HOMES = {
    "training.collectives.agreement": "any mean",
    "integrations.horovod.named.asynchronous": (
        "allgather_async allreduce_async allreduce_async_ alltoall_async broadcast_async "
        "broadcast_async_ grouped_allgather_async grouped_allreduce_async "
        "grouped_allreduce_async_ grouped_reducescatter_async reducescatter_async sparse_allreduce_async"
    ),
    "training.optim.compression": "Compression",
    "integrations.horovod.named.objects": (
        "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
    ),
    "integrations.horovod.named.operations": (
        "allgather allreduce allreduce_ alltoall barrier broadcast broadcast_ grouped_allgather grouped_allreduce "
        "grouped_allreduce_ grouped_reducescatter join reducescatter"
    ),
    "integrations.horovod.named.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "integrations.horovod.named.negotiation": "Adasum Average Max Min Product Sum",
    "integrations.horovod.sync_batch_norm": "SyncBatchNorm",
    "integrations.horovod.named.tensor_queue": "poll synchronize",
    "integrations.horovod.named.timeline": "start_timeline stop_timeline",
    "errors": ("FarandoleError FatalError HorovodInternalError HostsUpdatedInterrupt RecoverableError"),
    "job.launch.run_function": "run",
    "training.optim.distributed_optimizer": "DistributedOptimizer",
    "training.optim.step_agreement": "weight",
    "integrations.data_parallel.data_parallel": "DataParallel",
    "training.worker.capabilities": (
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled "
        "mpi_threads_supported nccl_built rocm_built"
    ),
    "training.worker.context": (
        "cross_rank cross_size device generation init is_homogeneous is_initialized local_rank local_size rank "
        "shutdown size slot"
    ),
}
_MODULES = {
    "elastic": "farandole.elastic",
    "mpi_ops": "farandole",
    "functions": "farandole.integrations.horovod.named.objects",
    "compression": "farandole.training.optim.compression",
    "optimizer": "farandole.training.optim.distributed_optimizer",
}
"""Modules by the names that scripts use, e.g. `hvd.mpi_ops.synchronize`."""

_HOME = {name: f"farandole.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, *_MODULES])


_SYSTEMS = {"darwin": "macOS", "win32": "Windows", "cygwin": "Windows"}


def _require_linux(platform: str) -> None:
    """Raise ImportError on another system, with what to do there."""
    if platform == "linux":
        return
    elsewhere = "WSL 2, which is a Linux" if platform in ("win32", "cygwin") else "a Linux container or virtual machine"
    raise ImportError(
        f"Farandole runs on Linux only, and this is {_SYSTEMS.get(platform, platform)}: it needs abstract sockets "
        f"and other interfaces of Linux. Use {elsewhere}. The same script runs there, with `farandole run` or alone"
    )


def _is_imported_by_torch() -> bool:
    """Return whether `import torch` runs now: it loads autoload.py of torchrun's process_group, and must work on every
    system. torch turns any exception into one of its own (torch 2.13, torch/__init__.py, _import_device_backends)."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


if not _is_imported_by_torch():
    _require_linux(sys.platform)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
