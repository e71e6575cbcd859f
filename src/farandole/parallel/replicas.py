"""Replicate a module in the memory of the CPU: new module objects, the same parameters.

data_parallel.py uses the replicas for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from farandole.errors import ConfigError


def replicas(
    module: torch.nn.Module, count: int
) -> tuple[list[torch.nn.Module], list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return `count` replicas, the masters, and for each replica its leaves.

    The masters are the parameters that need gradients; the leaves replace them and share their memory. Without grad
    mode there are no masters. The first replica has the module's own buffers, so that changes by forward() persist; the
    others have copies. Attributes that forward() sets are lost with the replica.
    """
    modules = list(module.modules())
    for each in modules:
        refuse_in_replicas(each)
    masters = _masters(modules) if torch.is_grad_enabled() else []
    made, leaves = [], []
    for place in range(count):
        own = [master.detach().requires_grad_() for master in masters]
        replaced: dict[int, torch.Tensor] = {id(master): leaf for master, leaf in zip(masters, own, strict=True)}
        made.append(_replica(modules, replaced, keeps_buffers=place == 0))
        leaves.append(own)
    return made, masters, leaves


def refuse_in_replicas(module: torch.nn.Module) -> None:
    """Raise ConfigError for a module that cannot run in several replicas."""
    reason = _reason_against(type(module))  # type: ignore[arg-type]
    if reason is not None:
        raise ConfigError(f"{type(module).__name__} in a DataParallel: {reason}")
    if "_torchdynamo_orig_callable" in module.__dict__ or module._compiled_call_impl is not None:
        raise ConfigError(
            f"a compiled module ({type(module).__name__}) in a DataParallel: it runs with the parameters that it was "
            "compiled with, not with those of a replica; leave out torch.compile()"
        )


@cache
def _reason_against(kind: type) -> str | None:
    if issubclass(kind, torch.jit.ScriptModule):
        return "a scripted module cannot be replicated in threads; leave out torch.jit"
    names = {base.__name__ for base in kind.__mro__}
    if "SyncBatchNorm" in names:
        return (
            "replicas would enter its collective several times and in any order; use BatchNorm, whose statistics are "
            "of each replica's part of the batch"
        )
    if names & {"DistributedDataParallel", "DataParallel"}:
        return "wrap the other way round, DistributedDataParallel around DataParallel, and each once"
    return None


def _masters(modules: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the masters; shared parameters once."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.requires_grad:
                found[id(tensor)] = tensor
    return list(found.values())


def _replica(modules: list[torch.nn.Module], replaced: dict[int, torch.Tensor], keeps_buffers: bool) -> torch.nn.Module:
    copies: dict[int, Any] = {id(module): _shallow(module) for module in modules}
    buffers: dict[int, torch.Tensor] = {}

    def copied(buffer: torch.Tensor) -> torch.Tensor:
        return buffers.setdefault(id(buffer), replaced.get(id(buffer), buffer.detach().clone()))

    for module in modules:
        new = copies[id(module)]
        # Not by setattr(), with which torch looks for parameters and children: it took most of the time.
        new.__dict__.update(
            _parameters=_mapped(module._parameters, lambda parameter: replaced.get(id(parameter), parameter)),
            # The dict itself: assignments in forward() persist, too.
            _buffers=module._buffers if keeps_buffers else _mapped(module._buffers, copied),
            _modules=_mapped(module._modules, lambda child: copies[id(child)]),
        )
    root: torch.nn.Module = copies[id(modules[0])]
    return root


def _mapped(entries: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: None if entry is None else change(entry) for name, entry in entries.items()}


def _shallow(module: torch.nn.Module) -> torch.nn.Module:
    """Return a shallow copy of a module. Its class may define which attributes of its instances must not be shared."""
    kind = type(module)
    if kind._replicate_for_data_parallel is not _TORCHS_OWN:
        known: torch.nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return known
    copy = kind.__new__(kind)
    copy.__dict__.update(module.__dict__, _is_replica=True)
    return copy


_TORCHS_OWN = torch.nn.Module._replicate_for_data_parallel
