"""The private names of other packages that the source uses: each may be gone in their next release."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "farandole"

USED: dict[str, set[str]] = {
    "base/command_parser.py": {"_actions", "_option_string_actions"},
    "base/liveness/status_reporting.py": {"_DummyThread"},
    "integrations/data_parallel/autograd_bridge.py": {"_C", "_autograd", "_get_current_graph_task_keep_graph"},
    "integrations/data_parallel/data_parallel.py": {"torch._compile._disable_dynamo"},
    "integrations/data_parallel/replicas.py": {"_compiled_call_impl", "_getframe", "_replicate_for_data_parallel"},
    "integrations/ddp/comm_hook.py": {"_comm_hooks"},
    "integrations/ddp/module.py": {
        "_check_comm_hook",
        "_comm_hooks",
        "_delay_all_reduce_params",
        "_disable_dynamo",
        "_farandole_wrapped",
        "_join_config",
        "_reconstructor",
        "_use_python_reducer",
    },
    "integrations/frameworks/lightning_outputs.py": {"_experiment", "_train_progress_bar"},
    "integrations/frameworks/lightning_trainer.py": {
        "_batches_that_stepped",
        "_data_fetcher",
        "_data_source",
        "_on_before_batch_transfer",
        "_opt_called",
        "_should_check_val_epoch",
        "_wrap_closure",
        "lightning.pytorch.loops.fit_loop._FitLoop",
        "lightning.pytorch.loops.loop._Loop",
    },
    "integrations/frameworks/transformers_outputs.py": {"_SummaryWriter"},
    "integrations/frameworks/transformers_trainer.py": {
        "_get_collator_with_removed_columns",
        "_get_num_items_in_batch",
        "_get_output_dir",
        "_opt_called",
        "_remove_unused_columns",
    },
    "integrations/horovod/alias/horovod/runner/__init__.py": {"horovod.runner.launch._run"},
    "integrations/horovod/alias/horovod/runner/gloo_run.py": {
        "horovod.runner._HorovodArgs",
        "horovod.runner.launch._run_static",
    },
    "integrations/horovod/launcher_options.py": {"_ArgumentGroup"},
    "integrations/horovod/named/asynchronous.py": {"_indices"},
    "integrations/horovod/named_path.py": {"_C", "_current_graph_task_id"},
    "integrations/horovod/sampler.py": {"_getframe", "torch.utils.data.dataloader._BaseDataLoaderIter"},
    "integrations/horovod/sync_batch_norm.py": {"torch.nn.modules.batchnorm._BatchNorm"},
    "integrations/ray/ray_engine.py": {"ray._private.state.state"},
    "integrations/sharding/elastic_shards.py": {"_optimizer_step_post_hooks"},
    "integrations/sharding/mirror.py": {"_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"},
    "integrations/sharding/shard_path.py": {
        "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather",
        "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllocMixin",
    },
    "integrations/sharding/sharded_modules.py": {
        "_fsdp_param_groups",
        "_get_fsdp_state",
        "_init_sharded_param",
        "_init_sharded_post_forward_param_metadata",
        "_lazy_init",
        "_local_tensor",
        "_orig_param_uid",
        "_setattr_on_modules",
        "_sharded_param_data",
        "_sharding_spec",
        "_unsharded_param",
        "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo",
        "torch.distributed.fsdp._fully_shard._fsdp_common._from_local_no_grad",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
    },
    "integrations/spark/spark_function.py": {"_active_spark_context"},
    "integrations/torchrun/in_place/loop_shape.py": {"_getframe"},
    "integrations/torchrun/in_place/loop_values.py": {"_getframe"},
    "integrations/torchrun/in_place/script_frames.py": {"_getframe"},
    "integrations/torchrun/in_place/script_memory.py": {"_SimpleCData", "_array"},
    "integrations/torchrun/in_place/script_objects.py": {"_getframe"},
    "integrations/torchrun/in_place/script_places.py": {"_inst", "_rand"},
    "integrations/torchrun/process_group/autoload.py": {
        "_C",
        "_create_c10d_store",
        "_distributed_c10d",
        "_getframe",
        "_rendezvous_handlers",
    },
    "integrations/torchrun/process_group/c10d_collectives.py": {"_nnz"},
    "integrations/torchrun/process_group/c10d_group.py": {"_C", "_distributed_c10d"},
    "integrations/torchrun/process_group/reconfigurable.py": {"torch._C._distributed_c10d.Store"},
    "integrations/torchrun/process_group/registration.py": {
        "torch._C._distributed_c10d.Store",
        "torch._C._distributed_c10d._DistributedBackendOptions",
        "torch.distributed.distributed_c10d._world",
        "torch.distributed.rendezvous._query_to_dict",
    },
    "integrations/torchrun/torchrun_parser.py": {"_ArgumentGroup"},
    "job/agent/fork_server_process.py": {"_is_device_backend_autoload_enabled", "_run_module_as_main"},
    "job/launch/run_parser.py": {"_ActionsContainer"},
    "job/launch/completion_command.py": {"_actions", "_expand_help", "_get_formatter"},
    "testing/quick_start.py": {"_dynamo"},
    "training/collectives/torch_versions.py": {
        "_C",
        "_clear_sharding_prop_cache",
        "_create_work_from_future",
        "_distributed_c10d",
        "_op_dispatcher",
        "_shutdown_backend",
        "torch.distributed.tensor._redistribute",
    },
    "training/data/prefetch.py": {
        "_error_if_any_worker_fails",
        "_remove_worker_pids",
        "_set_worker_pids",
        "_shutdown_workers",
        "_worker_pids_set",
        "_workers_done_event",
        "torch.utils.data._utils.signal_handling",
    },
    "training/data/stream_reader.py": {"_worker_info", "torch.utils.data._utils.worker"},
    "training/optim/buckets.py": {"_C", "_cdata", "_storage_Use_Count"},
    "training/optim/optimizer_mixin.py": {"_disable_dynamo", "_execution_engine", "_opt_called"},
    "training/optim/step_reduction.py": {"_foreach_copy_"},
    "training/state/numerics.py": {"_C", "_set_deterministic_algorithms"},
    "training/state/packed_metadata.py": {"_foreach_copy_", "_per_optimizer_states"},
    "training/state/shard_statistics.py": {"torch.nn.modules.batchnorm._NormBase"},
    "training/state/state_kinds.py": {"torch.nn.modules.batchnorm._NormBase"},
    "training/state/undivided_data.py": {"_index_sampler", "torch.utils.data.dataloader._BaseDataLoaderIter"},
    "training/state/watched_tensors.py": {"_foreach_copy_", "torch.nn.modules.batchnorm._NormBase"},
    "training/worker/loss_trial.py": {"torch.nn.modules.batchnorm._NormBase", "torch.nn.modules.dropout._DropoutNd"},
}
"""By file, the names that Python, torch and others keep for themselves; the list can only shrink."""

TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def is_private(name: str) -> bool:
    """`_replace` is a documented method of named tuples: its name only differs from those of their fields."""
    return name.startswith("_") and not name.startswith("__") and name != "_replace"


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def used(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Private names of others in a file: attributes, and what is imported from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in ours or ast.unparse(node.value).startswith("torch"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("farandole", "__")):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))):
                    yield name


def test_each_private_name_of_others_is_listed() -> None:
    ours = {name for tree in TREES.values() for name in defined(tree)}
    found = defaultdict[str, set[str]](set)
    for file, tree in TREES.items():
        for name in used(tree, ours):
            found[file].add(name)
    assert dict(found) == USED
