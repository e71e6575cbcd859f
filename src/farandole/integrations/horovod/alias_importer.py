"""The modules of the alias `horovod` that have nothing of their own: a table of names, and the importer that makes
modules of it. The alias puts the importer into sys.meta_path; its other modules are files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MPI_OPS = (
    "Adasum Average Compression HorovodInternalError Max Min ProcessSet Product Sum add_process_set allgather "
    "allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast "
    "broadcast_ broadcast_async broadcast_async_ ccl_built cross_rank cross_size cuda_built ddl_built "
    "global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce "
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter "
    "grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled "
    "mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built "
    "shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize"
)
_FUNCTIONS = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"

NAMES: dict[str, dict[str, str]] = {
    "common.elastic": {
        "farandole": "HorovodInternalError HostsUpdatedInterrupt",
        "farandole.elastic": "HostUpdateResult ObjectState State notification_manager run_fn",
    },
    "common.process_sets": {"farandole": "ProcessSet add_process_set global_process_set remove_process_set"},
    "data": {"horovod.data.data_loader_base": "AsyncDataLoaderMixin BaseDataLoader"},
    "ray": {"horovod.ray.elastic": "ElasticRayExecutor", "horovod.ray.runner": "RayExecutor"},
    "runner.elastic.worker": {"farandole.elastic": "HostUpdateResult"},
    "spark": {"farandole.integrations.spark.spark_function": "run run_elastic"},
    "torch.compression": {
        "farandole.training.optim.compression": "Compression Compressor FP16Compressor NoneCompressor"
    },
    "torch.elastic": {"farandole.elastic": "ElasticSampler TorchState run"},
    "torch.elastic.sampler": {"farandole.elastic": "ElasticSampler"},
    "torch.elastic.state": {
        "farandole.elastic": (
            "ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler TorchState get_handler_registry "
            "set_handler_registry"
        )
    },
    "torch.functions": {"farandole": _FUNCTIONS},
    "torch.mpi_ops": {"farandole": f"{_MPI_OPS} is_homogeneous", "horovod.common.basics": "HorovodBasics _basics"},
    "torch.optimizer": {"farandole": "DistributedOptimizer"},
    "torch.sync_batch_norm": {"farandole": "SyncBatchNorm"},
}
"""The names of each module, by the module that defines them."""

TORCH = f"{_MPI_OPS} {_FUNCTIONS} DistributedOptimizer SyncBatchNorm"
"""The names of horovod.torch, all of them Farandole's."""

MISSING = {"keras": "Keras", "mxnet": "MXNet", "tensorflow": "TensorFlow"}
"""Horovod's modules for other frameworks: importing them raises ImportError."""

_WITH_MODULES = {"data", "ray", "torch.elastic"}
"""Those of the table that contain other modules, which are files or in the table, too."""


class AliasImporter(MetaPathFinder, Loader):
    """Finds the modules of the table, and fills them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        alias, _, name = fullname.partition(".")
        if alias != "horovod" or name not in (NAMES.keys() | MISSING.keys()):
            return None
        spec = ModuleSpec(fullname, self, origin=__file__, is_package=name in _WITH_MODULES)
        if spec.submodule_search_locations is not None:
            folder = name.rpartition(".")[2]
            spec.submodule_search_locations += [os.path.join(parent, folder) for parent in path or ()]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        if name in MISSING:
            raise ImportError(
                f"horovod.{name}: Farandole is for PyTorch and has no {MISSING[name]} support; use horovod.torch"
            )
        module.__doc__ = "Names of Farandole, under Horovod's path."
        for home, names in NAMES[name].items():
            fill(vars(module), home, names)


def fill(namespace: dict[str, Any], home: str, names: str) -> None:
    """Do `from home import names`."""
    provider = __import__(home, fromlist=names.split())
    namespace.update({name: getattr(provider, name) for name in names.split()})


_IMPORTER = AliasImporter()


def install() -> None:
    """Let Python import the modules of the table. First of all importers: a folder without `__init__.py` would count
    as a package of its own."""
    if _IMPORTER not in sys.meta_path:
        sys.meta_path.insert(0, _IMPORTER)
