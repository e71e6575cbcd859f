"""Choose where the replicas of a module compute: in threads of the CPU, or on devices, once for each DataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from farandole.errors import ConfigError

Device = int | str | torch.device


@dataclass(frozen=True)
class Placement:
    """The place of the replicas: `threads` of the CPU if there are no `devices`.

    The module is on the first device, outputs on `output`.
    """

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
) -> Placement:
    """Return the placement that the arguments of DataParallel select for this module. Raises ConfigError."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"DataParallel: threads must be a number from 1 on, got {threads!r}")
    kind = _kind(module)
    if kind == "cpu":
        if device_ids is not None and any(_device(each).type != "cpu" for each in device_ids):
            raise ConfigError(
                f"DataParallel: device_ids={list(device_ids)}, and the module is on the CPU; move it to the first of "
                "them, or leave device_ids out and say threads="
            )
        count = threads or (len(device_ids) if device_ids else torch.get_num_threads())
        return Placement(count, (), torch.device(output_device if output_device is not None else "cpu"))
    if kind != "cuda":
        raise ConfigError(f"DataParallel: the module is on {kind!r}; it must be on the CPU or on a CUDA device")
    if threads is not None:
        raise ConfigError(
            f"DataParallel: threads={threads} is for a module on the CPU, this one is on CUDA: device_ids="
        )
    ids = range(torch.cuda.device_count()) if device_ids is None else device_ids
    devices = tuple(_device(each) for each in ids)
    if not devices or len(set(devices)) < len(devices) or any(each.type != "cuda" for each in devices):
        raise ConfigError(f"DataParallel: device_ids must be different CUDA devices, got {list(ids)}")
    refuse_elsewhere(module, devices[0])
    return Placement(1, devices, devices[0] if output_device is None else _device(output_device))


def refuse_elsewhere(module: torch.nn.Module, home: torch.device) -> None:
    """Raise ConfigError, naming it, for a parameter or buffer that is not on the module's device."""
    for each in module.modules():
        for group in (each._parameters, each._buffers):
            for name, tensor in group.items():
                if tensor is not None and tensor.device != home:
                    raise ConfigError(
                        f"DataParallel: {name!r} of {type(each).__name__}, of shape {tuple(tensor.shape)}, is on "
                        f"{tensor.device}, and the module has to be on {home} as a whole: module.to({str(home)!r})"
                    )


def _kind(module: torch.nn.Module) -> str:
    """Return the device type of the whole module; "cpu" for one without tensors. Raises ConfigError."""
    of_kind: dict[str, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"DataParallel: {name!r} has no shape yet; let the module see a batch before wrapping it")
        of_kind.setdefault(tensor.device.type, f"{name!r} on {tensor.device}")
    if len(of_kind) > 1:
        raise ConfigError(
            f"DataParallel: the module is on several devices, {' and '.join(of_kind.values())}; move it to one"
        )
    return next(iter(of_kind), "cpu")


def _device(given: Device) -> torch.device:
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
