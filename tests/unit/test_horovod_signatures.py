"""Scripts call Horovod's functions by position: the names, order and defaults of their arguments are fixed."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

import farandole as fd

REDUCE = "op=None, prescale_factor=1.0, postscale_factor=1.0, process_set"
SCATTER = "op=Average, process_set, prescale_factor=1.0, postscale_factor=1.0"

SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "is_homogeneous": "",
    "rank": "",
    "size": "",
    "local_rank": "",
    "local_size": "",
    "cross_rank": "",
    "cross_size": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "ProcessSet": "*",
    "add_process_set": "process_set!",
    "remove_process_set": "process_set!",
    "allreduce": f"tensor, average=None, name=None, compression=none, {REDUCE}",
    "allreduce_async": f"tensor, average=None, name=None, {REDUCE}",
    "allreduce_": f"tensor, average=None, name=None, {REDUCE}",
    "allreduce_async_": f"tensor, average=None, name=None, {REDUCE}",
    "grouped_allreduce": f"tensors, average=None, name=None, compression=none, {REDUCE}",
    "grouped_allreduce_async": f"tensors, average=None, name=None, {REDUCE}",
    "grouped_allreduce_": f"tensors, average=None, name=None, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, average=None, name=None, {REDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set",
    "allgather": "tensor, name=None, process_set",
    "allgather_async": "tensor, name=None, process_set",
    "grouped_allgather": "tensors, name=None, process_set",
    "grouped_allgather_async": "tensors, name=None, process_set",
    "broadcast": "tensor, root_rank, name=None, process_set",
    "broadcast_async": "tensor, root_rank, name=None, process_set",
    "broadcast_": "tensor, root_rank, name=None, process_set",
    "broadcast_async_": "tensor, root_rank, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, process_set",
    "alltoall_async": "tensor, splits=None, name=None, process_set",
    "reducescatter": f"tensor, name=None, compression=none, {SCATTER}",
    "reducescatter_async": f"tensor, name=None, {SCATTER}",
    "grouped_reducescatter": f"tensors, name=None, compression=none, {SCATTER}",
    "grouped_reducescatter_async": f"tensors, name=None, {SCATTER}",
    "join": "device=-1",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=None"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
}
"""`process_set` alone is the global one by default, `process_set!` has no default; `*`: one argument of any name."""


def in_words(parameter: inspect.Parameter) -> str:
    value: Any = parameter.default
    if value is inspect.Parameter.empty:
        return "process_set!" if parameter.name == "process_set" else parameter.name
    if value is fd.global_process_set:
        return parameter.name
    if value is fd.Compression.none:
        return f"{parameter.name}=none"
    return f"{parameter.name}={'Average' if value is fd.Average else value}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_order_of_arguments_is_horovods(name: str) -> None:
    parameters = list(inspect.signature(getattr(fd, name)).parameters.values())
    # What is ours alone can be given by name only.
    parameters = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    if SIGNATURES[name] == "*":
        assert len(parameters) == 1
    else:
        assert ", ".join(map(in_words, parameters)) == SIGNATURES[name]


def test_operations_are_horovods_numbers() -> None:
    numbers = [fd.Average, fd.Sum, fd.Adasum, fd.Min, fd.Max, fd.Product]
    assert [int(each) for each in numbers] == list(range(6))
    assert all(isinstance(each, int) for each in numbers)


@pytest.mark.parametrize("name", sorted(fd.__all__))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(fd, name) is not None


def test_type_checkers_and_python_get_every_public_name_from_the_same_module() -> None:
    tree = ast.parse(inspect.getsource(fd))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname: node.module for node in imports for alias in node.names if alias.asname not in fd._MODULES}
    del homes[None]  # modules that have another name here
    assert homes == fd._HOME
