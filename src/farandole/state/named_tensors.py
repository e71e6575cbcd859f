"""Names of all tensors of a StepState that must be equal on all ranks, and access to them by name. Only this module has
this knowledge; state_digest.py hashes the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.modules.batchnorm import _NormBase

from farandole.state.optimizer_state import with_inner


class Kinds(Protocol):
    """The values that a state was given, by name; see step_state.py."""

    @property
    def modules(self) -> dict[str, torch.nn.Module]: ...
    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]: ...
    @property
    def stateful(self) -> dict[str, Any]: ...
    @property
    def values(self) -> list[str]: ...


class NamedTensor(NamedTuple):
    """A tensor of a state.

    name      as "model.0.weight", "optimizer.0.exp_avg" or "ema.module.0.bias"
    owner     the object that contains it, and stays the same; looked up by the keys of `path`, it gives the live tensor
    is_trained  parameters and optimizer state, which only an optimizer's step changes
    """

    name: str
    owner: Any
    path: tuple[Any, ...]
    is_trained: bool

    def find(self) -> torch.Tensor | None:
        """Return the live tensor; None when it does not exist any more."""
        value = self.owner
        for key in self.path:
            try:
                if isinstance(value, dict) and key not in value:  # reading a defaultdict would add it
                    return None
                value = value[key]
            except (LookupError, TypeError):
                return None
        return value if _is_plain(value) else None


def named_tensors(kinds: Kinds, attributes: Mapping[str, Any]) -> list[NamedTensor]:
    """Return all tensors of a state, each once, in the same order on all ranks.

    Running statistics of BatchNorm are excluded: each rank computes its own from its local batch. Sparse tensors are
    excluded too, and tensors of other classes, such as those of a sharded model, whose parts differ by rank.

    Args:
        kinds: The values that the state was given.
        attributes: The attributes of the state, which contain its plain values.
    """
    seen: dict[int, torch.Tensor] = {}  # kept alive during the loop: state_dict() may create them anew
    found = []
    for each in _all(kinds, attributes):
        tensor = each.find()
        if tensor is not None and id(tensor) not in seen:
            seen[id(tensor)] = tensor
            found.append(each)
    return found


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values in nested containers, with the keys that lead to them; not the containers themselves."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, (*path, key))
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from tensors_in(each, (*path, key))
    else:
        yield path, value


def _all(kinds: Kinds, attributes: Mapping[str, Any]) -> Iterator[NamedTensor]:
    for name, module in kinds.modules.items():
        yield from _of_module(f"{name}.", module)
    for name, optimizer in kinds.optimizers.items():
        for inner, each in with_inner(name, optimizer).items():
            yield from _of_optimizer(inner, each)
    for name, value in kinds.stateful.items():
        yield from _nested(name, _StateDict(value), (), value.state_dict())
    for name in kinds.values:
        yield from _nested(name, attributes, (name,), attributes[name])


def _of_module(prefix: str, module: torch.nn.Module) -> Iterator[NamedTensor]:
    for key in module._parameters:
        yield NamedTensor(prefix + key, module._parameters, (key,), is_trained=True)
    # The base class of all BatchNorm and InstanceNorm layers (torch 2.13, torch/nn/modules/batchnorm.py).
    if not isinstance(module, _NormBase):
        for key in module._buffers:
            yield NamedTensor(prefix + key, module._buffers, (key,), is_trained=False)
    for key, child in module._modules.items():
        if child is not None:
            yield from _of_module(f"{prefix}{key}.", child)


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[NamedTensor]:
    """Yield the tensors of an optimizer. Parameters in no module are included; those of modules came before.
    optimizer.state is another object after load_state_dict()."""
    owner, number = optimizer.__dict__, 0
    for place, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield NamedTensor(f"{name}.{number}", owner, ("param_groups", place, "params", index), is_trained=True)
            if parameter in optimizer.state:
                path = ("state", parameter)
                entry = optimizer.state[parameter]
                for keys, _ in tensors_in({key: entry[key] for key in sorted(entry, key=str)}):
                    path_text = ".".join(map(str, (number, *keys)))
                    yield NamedTensor(f"{name}.{path_text}", owner, (*path, *keys), is_trained=True)
            number += 1


def _nested(name: str, owner: Any, path: tuple[Any, ...], value: Any) -> Iterator[NamedTensor]:
    for keys, each in tensors_in(value):
        if isinstance(each, torch.Tensor):
            yield NamedTensor(".".join(map(str, (name, *keys))), owner, (*path, *keys), is_trained=False)


class _StateDict:
    """Access to an object whose tensors are reachable only through its state_dict()."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> Any:
        return self._value.state_dict()[key]


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type != "meta"
    )
