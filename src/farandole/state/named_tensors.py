"""Every tensor of a StepState that has to be the same on all ranks, by name, and where to find it again. The one place
that knows; state_digest.py hashes them."""

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
    """One tensor of a state.

    name      as "model.0.weight", "optimizer.0.exp_avg" or "ema.module.0.bias"
    owner     what has it, and stays the same object: looked up by the keys of `path`, it gives the tensor as it is now
    is_trained  parameters and optimizer state, which only an optimizer's step changes
    """

    name: str
    owner: Any
    path: tuple[Any, ...]
    is_trained: bool

    def find(self) -> torch.Tensor | None:
        """The tensor as it is now; None where there is none any more."""
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
    """Return all of them, each tensor once, in the same order on all ranks.

    Running statistics of BatchNorm are not among them: each rank computes its own from its local batch. Nor are sparse
    tensors, and those of classes of their own, as those of a sharded model, whose parts differ by rank.

    Args:
        kinds: the values that the state was given.
        attributes: the state's own ones, where its plain values are.
    """
    seen: dict[int, torch.Tensor] = {}  # they are kept while this goes on: state_dict() may make them anew
    found = []
    for each in _all(kinds, attributes):
        tensor = each.find()
        if tensor is not None and id(tensor) not in seen:
            seen[id(tensor)] = tensor
            found.append(each)
    return found


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is in nested containers, with the keys that lead there; not the containers themselves."""
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
    if not isinstance(module, _NormBase):
        for key in module._buffers:
            yield NamedTensor(prefix + key, module._buffers, (key,), is_trained=False)
    for key, child in module._modules.items():
        if child is not None:
            yield from _of_module(f"{prefix}{key}.", child)


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[NamedTensor]:
    """Parameters that no module has are among them; those of modules were there before. optimizer.state is another
    object after load_state_dict()."""
    owner, number = optimizer.__dict__, 0
    for place, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield NamedTensor(f"{name}.{number}", owner, ("param_groups", place, "params", index), is_trained=True)
            if parameter in optimizer.state:
                path = ("state", parameter)
                entry = optimizer.state[parameter]
                for keys, _ in tensors_in({key: entry[key] for key in sorted(entry, key=str)}):
                    said = ".".join(map(str, (number, *keys)))
                    yield NamedTensor(f"{name}.{said}", owner, (*path, *keys), is_trained=True)
            number += 1


def _nested(name: str, owner: Any, path: tuple[Any, ...], value: Any) -> Iterator[NamedTensor]:
    for keys, each in tensors_in(value):
        if isinstance(each, torch.Tensor):
            yield NamedTensor(".".join(map(str, (name, *keys))), owner, (*path, *keys), is_trained=False)


class _StateDict:
    """Of an object whose tensors are known by its state_dict() only."""

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
