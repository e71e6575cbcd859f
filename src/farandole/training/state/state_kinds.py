"""The values that a StepState is given, by their kind: each kind is captured, restored and sent in its own way. And
all tensors in them, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from farandole.base.membership import Shortfall
from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.state.batch import GlobalBatch
from farandole.training.state.optimizer_state import OptimizerState, is_shard, with_inner
from farandole.training.state.packed_metadata import is_stateful
from farandole.training.state.watched_tensors import is_plain_tensor, modules_with_extra_state


class Loader(Protocol):
    """The part of a loader that the state needs: its position, which moves with a decided step."""

    epoch: int
    cursor: int
    seed: int
    hooks: Any  # the run loop installs itself here (data/elastic_loader.py)

    def commit(self, global_batch: GlobalBatch) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def set_world(self, rank: int, size: int) -> None: ...
    def warm_up(self) -> None: ...
    def start_rehearsal(self, rank: int, size: int, is_at_tail: bool) -> int: ...
    def end_rehearsals(self) -> None: ...
    def shortfall(self) -> Shortfall | None: ...
    def note_untrained(self, is_all: bool) -> None: ...


class Kinds:
    """The values that a state was given, by name: its model and optimizer, each of which may be None, and the others.
    `values` has the names of plain values, which fit no other field; `states` are those of the optimizers."""

    def __init__(self, model: Any, optimizer: Any, others: Mapping[str, Any]) -> None:
        named = {"model": model, "optimizer": optimizer, **others}
        self.modules = {name: value for name, value in named.items() if isinstance(value, torch.nn.Module)}
        self.optimizers = {name: value for name, value in named.items() if isinstance(value, torch.optim.Optimizer)}
        self.states = [OptimizerState(name, each) for name, each in self.optimizers.items()]
        self.extra = {name: found for name, each in self.modules.items() if (found := modules_with_extra_state(each))}
        left = [name for name in others if name not in self.modules and name not in self.optimizers]
        self.stateful = {name: named[name] for name in left if is_stateful(named[name])}
        stateful = self.stateful.values()
        self.scalers = [each for each in stateful if isinstance(each, torch.amp.GradScaler) and each.is_enabled()]
        self.values = [name for name in left if name not in self.stateful]

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return parameters by module and name; an optimizer's parameters outside of all modules, by place in it."""
        named: dict[str, dict[str, torch.Tensor]] = {
            name: {key: each for key, each in module.named_parameters() if not is_shard(each)}
            for name, module in self.modules.items()
        }
        known = {id(parameter) for group in named.values() for parameter in group.values()}
        loose = {
            f"{each.name}.{index}": parameter
            for each in self.states
            for index, parameter in enumerate(each.parameters)
            if id(parameter) not in known and not is_shard(parameter)
        }
        return {**named, "": loose}

    def names_of_parameters(self) -> dict[torch.Tensor, str]:
        """Return the names of the parameters in modules."""
        modules = self.modules.items()
        return {each: f"{name}.{key}" for name, module in modules for key, each in module.named_parameters()}

    def name_of(self, item: torch.Tensor | torch.nn.Module) -> str:
        """Return the name of a parameter or of a layer, with that of its model."""
        named: dict[str, torch.Tensor | torch.nn.Module] = {
            f"{name}.{key}".strip("."): each for name, group in self.parameters().items() for key, each in group.items()
        }
        for name, module in self.modules.items():
            named |= {f"{name}.{key}".strip("."): each for key, each in module.named_modules()}
        return next((name for name, each in named.items() if each is item), type(item).__name__)


def without_parallel(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module within a DistributedDataParallel; any other one as it is."""
    inner: Any = module.module if isinstance(module, DistributedDataParallel) else module
    return cast(torch.nn.Module, inner)


# All tensors of a state that must be equal on all ranks, by name ------------------------------------------------------


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
        return value if is_plain_tensor(value) else None


def named_tensors(kinds: Kinds, attributes: Mapping[str, Any], has_all_buffers: bool = False) -> list[NamedTensor]:
    """Return all tensors of a state, each once, in the same order on all ranks.

    Running statistics of BatchNorm are excluded unless `has_all_buffers`: except in strict mode, each rank computes its
    own from its local batch. So are buffers of a DistributedDataParallel that broadcasts them: each forward pass begins
    with those of rank 0, and may change them by its local batch. Sparse tensors are excluded too, and tensors of other
    classes, such as those of a sharded model, whose parts differ by rank.

    Args:
        kinds: The values that the state was given.
        attributes: The attributes of the state, which contain its plain values.
        has_all_buffers: Include running statistics.
    """
    seen: dict[int, torch.Tensor] = {}  # kept alive during the loop: state_dict() may create them anew
    found = []
    for each in _all(kinds, attributes, has_all_buffers):
        tensor = each.find()
        if tensor is not None and id(tensor) not in seen:
            seen[id(tensor)] = tensor
            found.append(each)
    return found


def hash_of(tensors: Iterable[NamedTensor]) -> str:
    """Return a SHA-256 of the tensors' names, shapes, dtypes and bytes, in their order, as 64 hexadecimal digits."""
    found = hashlib.sha256()
    for each in tensors:
        tensor = each.find()
        if tensor is not None:
            found.update(f"{each.name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            found.update(bytes_of(tensor.detach().cpu()).numpy().data)
    return found.hexdigest()


def nested_values(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values in nested containers, with the keys that lead to them; not the containers themselves."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from nested_values(each, (*path, key))
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from nested_values(each, (*path, key))
    else:
        yield path, value


def _all(kinds: Kinds, attributes: Mapping[str, Any], has_all_buffers: bool) -> Iterator[NamedTensor]:
    for name, module in kinds.modules.items():
        yield from _of_module(f"{name}.", module, has_all_buffers)
    for name, optimizer in kinds.optimizers.items():
        for inner, each in with_inner(name, optimizer).items():
            yield from _of_optimizer(inner, each)
    for name, value in kinds.stateful.items():
        yield from _nested(name, _StateDict(value), (), value.state_dict())
    for name in kinds.values:
        yield from _nested(name, attributes, (name,), attributes[name])


def _of_module(
    prefix: str, module: torch.nn.Module, has_all_buffers: bool, are_broadcast: bool = False
) -> Iterator[NamedTensor]:
    for key in module._parameters:
        yield NamedTensor(prefix + key, module._parameters, (key,), is_trained=True)
    if isinstance(module, DistributedDataParallel):
        are_broadcast |= bool(module.broadcast_buffers)
    # The base class of all BatchNorm and InstanceNorm layers (torch 2.13, torch/nn/modules/batchnorm.py).
    if has_all_buffers or not (are_broadcast or isinstance(module, _NormBase)):
        for key in module._buffers:
            yield NamedTensor(prefix + key, module._buffers, (key,), is_trained=False)
    for key, child in module._modules.items():
        if child is not None:
            yield from _of_module(f"{prefix}{key}.", child, has_all_buffers, are_broadcast)


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
                for keys, _ in nested_values({key: entry[key] for key in sorted(entry, key=str)}):
                    path_text = ".".join(map(str, (number, *keys)))
                    yield NamedTensor(f"{name}.{path_text}", owner, (*path, *keys), is_trained=True)
            number += 1


def _nested(name: str, owner: Any, path: tuple[Any, ...], value: Any) -> Iterator[NamedTensor]:
    for keys, each in nested_values(value):
        if isinstance(each, torch.Tensor):
            yield NamedTensor(".".join(map(str, (name, *keys))), owner, (*path, *keys), is_trained=False)


class _StateDict:
    """Access to an object whose tensors are reachable only through its state_dict()."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> Any:
        return self._value.state_dict()[key]
