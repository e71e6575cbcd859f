"""Modules that FSDP2 has divided: their parameters, and how they are divided anew in place, with all objects that
scripts refer to. All that is private of torch is used here (torch 2.13, torch/distributed/fsdp/_fully_shard)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, _from_local_no_grad
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from farandole.errors import ConfigError
from farandole.training.collectives import world


class ShardedModules:
    """The divided modules of a state.

    parameters  the divided parameters, each once, in the order of the modules, with their names
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        found = [each for module in modules for each in module.modules() if isinstance(each, FSDPModule)]
        inner = {id(each) for one in found for each in one.modules() if each is not one}
        self.roots = [each for each in found if id(each) not in inner]
        self._modules = found
        self._groups: list[Any] = []
        for each in found:
            for group in each._get_fsdp_state()._fsdp_param_groups:
                if not any(group is known for known in self._groups):
                    self._groups.append(group)
        self._params: list[Any] = [each for group in self._groups for each in group.fsdp_params]
        names = {id(each): name for module in modules for name, each in module.named_parameters()}
        self.parameters: dict[torch.Tensor, str] = {
            each.sharded_param: names.get(id(each.sharded_param), "") for each in self._params
        }
        others = [name for module in modules for name, each in module.named_parameters() if is_divided(each)]
        self._refuse([name for name in others if name not in self.parameters.values()])

    def _refuse(self, others: Sequence[str]) -> None:
        if others:
            raise ConfigError(
                f"{others[0]} is divided among the workers, and not by fully_shard(): tensor parallelism is "
                "not supported"
            )
        for each in self._params:
            if each.is_dtensor or each.fsdp_placement != Shard(0):
                raise ConfigError(
                    f"a parameter of shape {tuple(each.sharded_param.shape)} is divided in another way than along its "
                    f"first dimension by fully_shard(): tensor parallelism and shard_placement_fn are not supported"
                )
            if each.device.type != "cpu":
                raise ConfigError(
                    f"a model that fully_shard() has divided is on {each.device}: only the CPU is supported so far"
                )
            if each.offload_to_cpu:
                raise ConfigError("fully_shard(offload_policy=CPUOffloadPolicy()) is not supported")
        size = world.current().placement.size
        for group in self._groups:
            mesh = group.mesh_info.mesh
            if type(group.mesh_info) is not FSDPMeshInfo or mesh.ndim != 1 or mesh.size() != size:
                raise ConfigError(
                    f"fully_shard() with a mesh of shape {tuple(mesh.shape)} in a job of {size} workers: leave mesh "
                    f"out; for replicas, see farandole.sharding.ShardedState (docs/hybrid-sharding.md)"
                )
            after = group.post_forward_mesh_info
            if after is not None and after is not group.mesh_info:
                raise ConfigError("fully_shard(reshard_after_forward=number) cannot follow the membership: use a bool")

    def communicate_by(self, all_gather: Any, reduce_scatter: Any) -> None:
        """Let these carry out the collectives, whose sum is not divided."""
        for each in self._modules:
            each.set_custom_all_gather(all_gather)
            each.set_custom_reduce_scatter(reduce_scatter)
            each.set_gradient_divide_factor(1.0)

    def end_pass(self) -> None:
        """Forget passes that were interrupted: all parameters are divided again, and no gradient is left."""
        for root in self.roots:
            root._get_fsdp_state()._lazy_init()  # what a first pass does; without it there is nothing to forget
            root.reset_iter_state()
        for each in self._params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
            each.sharded_param.grad = None

    def divide(self, parts: Sequence[torch.Tensor]) -> None:
        """Divide all parameters among the workers of this world: `parts` are this worker's rows."""
        info = FSDPMeshInfo(_mesh(), shard_mesh_dim=0)
        for group in self._groups:
            group.mesh_info = info
            if group.post_forward_mesh_info is not None:
                group.post_forward_mesh_info = info
        for each, rows in zip(self._params, parts, strict=True):
            _divide(each, info, rows)


@torch.no_grad()
def _divide(each: Any, info: FSDPMeshInfo, local: torch.Tensor) -> None:
    parameter, number = each.sharded_param, each._orig_param_uid
    whole = torch.nn.Parameter(
        torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
    )
    each._init_sharded_param(whole, each.device, None, info)
    each._orig_param_uid = number
    if each.post_forward_mesh_info is not None:
        each.post_forward_mesh_info = info
        each._init_sharded_post_forward_param_metadata(whole)
    padded = torch.zeros(each.padded_sharded_param_size, dtype=parameter.dtype, device=each.device)
    padded[: len(local)].copy_(local)
    each._sharded_param_data = padded.view(-1)
    parameter._local_tensor, parameter._spec = padded[: len(local)], each._sharding_spec
    each.sharded_param = parameter
    each._setattr_on_modules(parameter)
    each.all_gather_outputs = []
    if hasattr(each, "_unsharded_param"):
        del each._unsharded_param


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (world.current().placement.size,))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's rows of a divided tensor, live."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def is_divided(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def exchange(tensor: object, other: object) -> None:
    """Let a divided tensor have the rows and the division of another one; it stays the same object."""
    assert isinstance(tensor, DTensor)
    assert isinstance(other, DTensor)
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def divided_like(parameter: torch.Tensor, rows: torch.Tensor) -> DTensor:
    """Return a tensor that is divided as a parameter is, with this worker's rows."""
    assert isinstance(parameter, DTensor)
    meta = TensorMeta(parameter.shape, parameter.stride(), rows.dtype)
    return _from_local_no_grad(rows, DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta))
