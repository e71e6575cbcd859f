"""Where the replicas of a module compute: the choice, and the computation in threads of the CPU or on devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import replicate
from torch.nn.parameter import is_lazy

from farandole.errors import ConfigError
from farandole.integrations.data_parallel.autograd_bridge import Graph, bridge, traced
from farandole.integrations.data_parallel.dividing import InputPart, map_leaves
from farandole.integrations.data_parallel.replicas import Draws, ReplicaRandomness, replicas
from farandole.integrations.data_parallel.thread_pool import ThreadPool

Device = int | str | torch.device


@dataclass(frozen=True)
class ReplicaPlacement:
    """The place of the replicas: `threads` of the CPU if there are no `devices`. The module is on the first device,
    outputs on `output`."""

    threads: int
    devices: tuple[torch.device, ...]
    output: torch.device

    @property
    def replicas(self) -> int:
        return len(self.devices) or self.threads

    @property
    def home(self) -> torch.device:
        return self.devices[0] if self.devices else torch.device("cpu")


def place(
    module: torch.nn.Module, threads: int | None, device_ids: Sequence[Device] | None, output_device: Device | None
) -> ReplicaPlacement:
    """Return the placement that the arguments of DataParallel select for this module. Raises ConfigError."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"DataParallel: threads must be 1 or more, got {threads!r}")
    kind = _kind(module)
    if kind == "cpu":
        if device_ids is not None and any(_device(each).type != "cpu" for each in device_ids):
            raise ConfigError(
                f"DataParallel: device_ids={list(device_ids)}, and the module is on the CPU; move it to the first of "
                "them, or leave device_ids out and pass threads="
            )
        count = threads or (len(device_ids) if device_ids else torch.get_num_threads())
        return ReplicaPlacement(count, (), torch.device(output_device if output_device is not None else "cpu"))
    if kind != "cuda":
        raise ConfigError(f"DataParallel: the module is on {kind!r}; it must be on the CPU or on a CUDA device")
    if threads is not None:
        raise ConfigError(
            f"DataParallel: threads={threads} is for a module on the CPU, this module is on CUDA: pass device_ids="
        )
    ids = range(torch.cuda.device_count()) if device_ids is None else device_ids
    devices = tuple(_cuda_device(each) for each in ids)
    if not devices or len(set(devices)) < len(devices) or any(each.type != "cuda" for each in devices):
        raise ConfigError(f"DataParallel: device_ids must be different CUDA devices, got {list(ids)}")
    refuse_elsewhere(module, devices[0])
    return ReplicaPlacement(1, devices, devices[0] if output_device is None else _cuda_device(output_device))


def refuse_elsewhere(module: torch.nn.Module, home: torch.device) -> None:
    """Raise ConfigError, naming it, for a parameter or buffer that is not on the module's device."""
    for each in module.modules():
        for group in (each._parameters, each._buffers):
            for name, tensor in group.items():
                if tensor is not None and tensor.device != home:
                    raise ConfigError(
                        f"DataParallel: {name!r} of {type(each).__name__}, of shape {tuple(tensor.shape)}, is on "
                        f"{tensor.device}, and the whole module must be on {home}: module.to({str(home)!r})"
                    )


def _kind(module: torch.nn.Module) -> str:
    """Return the device type of the whole module; "cpu" for one without tensors. Raises ConfigError."""
    of_kind: dict[str, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"DataParallel: {name!r} has no shape yet; run the module on a batch before wrapping it")
        of_kind.setdefault(tensor.device.type, f"{name!r} on {tensor.device}")
    if len(of_kind) > 1:
        raise ConfigError(
            f"DataParallel: the module is on several devices, {' and '.join(of_kind.values())}; move it to one device"
        )
    return next(iter(of_kind), "cpu")


def _device(given: Device) -> torch.device:
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def _cuda_device(given: Device) -> torch.device:
    """Return the device with its number: "cuda" is the current one."""
    device = _device(given)
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


# Replicas on CUDA devices, by torch's own functions; their graphs are the caller's ------------------------------------
#
# torch's engine has a thread for each device. This part is thin; tests/gpu runs it.


def compute_on_devices(
    module: torch.nn.Module, parts: Sequence[InputPart], placement: ReplicaPlacement, pool: ThreadPool
) -> list[Any]:
    """Return the outputs of the replicas, on the output device."""
    devices = placement.devices[: len(parts)]
    copies = replicate(module, devices, detach=not torch.is_grad_enabled())
    tasks: list[Callable[[], Any]] = [
        partial(_on_device, copy, moved(part.args, device), moved(part.kwargs, device), device)
        for copy, part, device in zip(copies, parts, devices, strict=True)
    ]
    return [moved(output, placement.output) for output in pool.run(tasks)]


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on the device; gradients flow back."""
    return map_leaves(
        value, lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
    )


def _on_device(replica: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    with torch.cuda.device(device):
        return replica(*args, **kwargs)


# Replicas in threads of the CPU: their forward passes at the same time, and their backward passes, too ----------------


def compute_in_threads(module: torch.nn.Module, parts: Sequence[InputPart], pool: ThreadPool) -> list[Any]:
    """Return the outputs of the replicas. Gradients flow to the module's parameters and the parts' tensors."""
    copies, masters, leaves = replicas(module, len(parts))
    inputs = [_Inputs(part) for part in parts]
    draws = Draws()
    try:
        computed = pool.run(
            [
                partial(_compute_in_thread, copy, each, masters, own, draws, place)
                for place, (copy, each, own) in enumerate(zip(copies, inputs, leaves, strict=True))
            ]
        )
    finally:
        draws.close()
    bridged = bridge(pool, [graph for _, graph in computed])
    return [_replaced(output, graph.outs, new) for (output, graph), new in zip(computed, bridged, strict=True)]


class _Inputs:
    """A part of the batch, with leaves in place of the tensors that need gradients."""

    def __init__(self, part: InputPart) -> None:
        self.masters: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.args, self.kwargs = part.args, part.kwargs
        if torch.is_grad_enabled():
            self.args, self.kwargs = map_leaves(part.args, self._leaf), map_leaves(part.kwargs, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        self.masters.append(value)
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1].clone()  # only a non-leaf may be changed in place, e.g. by ReLU(inplace=True)


def _compute_in_thread(
    replica: torch.nn.Module,
    inputs: _Inputs,
    masters: list[torch.Tensor],
    leaves: list[torch.Tensor],
    draws: Draws,
    place: int,
) -> tuple[Any, Graph]:
    """Compute one replica, in its thread."""
    with ReplicaRandomness(draws, place):
        output = replica(*inputs.args, **inputs.kwargs)
    return output, traced(masters + inputs.masters, leaves + inputs.leaves, _outs(output))


def _outs(output: Any) -> list[torch.Tensor]:
    """Return the tensors that need gradients, each once."""
    found: dict[int, torch.Tensor] = {}

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found[id(leaf)] = leaf

    map_leaves(output, look)
    return list(found.values())


def _replaced(output: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Any:
    new_of = {id(before): after for before, after in zip(old, new, strict=True)}
    return map_leaves(output, lambda leaf: new_of.get(id(leaf), leaf))
