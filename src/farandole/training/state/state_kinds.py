"""The values that a StepState is given, by their kind: each kind is captured, restored and sent in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch

from farandole.base.membership import Shortfall
from farandole.training.state.batch import GlobalBatch
from farandole.training.state.optimizer_state import OptimizerState
from farandole.training.state.packed_metadata import is_stateful
from farandole.training.state.watched_tensors import ExtraState, modules_with_extra_state


@runtime_checkable
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


@dataclass(frozen=True)
class Kinds:
    """The values that a state was given, by name. `values` has the names of plain values, which fit no other field."""

    modules: dict[str, torch.nn.Module]
    extra: dict[str, ExtraState]
    optimizers: dict[str, torch.optim.Optimizer]
    states: list[OptimizerState]  # of the optimizers
    stateful: dict[str, Any]
    scalers: list[torch.amp.GradScaler]
    values: list[str]

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return parameters by module and name; an optimizer's parameters outside of all modules, by place in it."""
        named: dict[str, dict[str, torch.Tensor]] = {
            name: dict(module.named_parameters()) for name, module in self.modules.items()
        }
        known = {id(parameter) for group in named.values() for parameter in group.values()}
        loose = {
            f"{each.name}.{index}": parameter
            for each in self.states
            for index, parameter in enumerate(each.parameters)
            if id(parameter) not in known
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


@dataclass(frozen=True)
class Change:
    """The values before a change: the metadata, and the versions of the watched tensors."""

    metadata: dict[str, Any]
    mark: list[int]


def kinds_of(model: Any, optimizer: Any, others: Mapping[str, Any]) -> Kinds:
    """Classify the values of a state: its model and optimizer, each of which may be None, and the others by name."""
    named = {"model": model, "optimizer": optimizer, **others}
    modules = {name: value for name, value in named.items() if isinstance(value, torch.nn.Module)}
    optimizers = {name: value for name, value in named.items() if isinstance(value, torch.optim.Optimizer)}
    states = [OptimizerState(name, each) for name, each in optimizers.items()]
    left = [name for name in others if name not in modules and name not in optimizers]
    stateful = {name: named[name] for name in left if is_stateful(named[name])}
    extra = {name: found for name, module in modules.items() if (found := modules_with_extra_state(module))}
    scalers = [each for each in stateful.values() if isinstance(each, torch.amp.GradScaler) and each.is_enabled()]
    values = [name for name in left if name not in stateful]
    return Kinds(modules, extra, optimizers, states, stateful, scalers, values)


def without_parallel(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module within a DistributedDataParallel; any other one as it is."""
    inner: Any = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
    return cast(torch.nn.Module, inner)
