"""TorchState: everything of a training job that must survive a change of the membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from farandole.errors import ConfigError
from farandole.membership import Progress
from farandole.state import step
from farandole.state.packing import Packed, pack, unpack
from farandole.state.ticket import Batch, Ticket


@runtime_checkable
class Loader(Protocol):
    """What the state needs of a loader: where it is, and to move it with a decided step."""

    epoch: int
    cursor: int
    seed: int
    boundary: Any  # the run loop puts itself here (data/boundary.py)

    def commit(self, ticket: Ticket) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def set_world(self, rank: int, size: int) -> None: ...
    def limit_local_batch(self, world: int) -> None: ...


class TorchState:
    """Model, optimizer, loader and whatever else moves with a step.

    TorchState(model=..., optimizer=..., loader=..., after_step=[scheduler.step], scheduler=scheduler, best=0.0)

    model, optimizer, loader  the things to train with; `optimizer` a DistributedOptimizer
    after_step  called without arguments right after each applied optimizer step, inside the atomic step
    **tracked   every keyword becomes an attribute: objects with state_dict()/load_state_dict() (schedulers, a
                GradScaler, further modules) and picklable values. On a regroup they come from the source rank;
                when a step is done again they are put back to where they were before it.

    `state.step` is the number of decided steps. Raises ConfigError for values that cannot be pickled.

    Large state is parameters and optimizer tensors, small state all the rest (design: words).
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loader: Loader | None = None,
        after_step: Iterable[Callable[[], object]] = (),
        **tracked: Any,
    ) -> None:
        # Any: a script should not have to ask at each use whether it has given them.
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.loader: Any = loader
        self.step = 0
        self.lineage = 1
        self.boundary = 0
        self.is_holder = False
        self.after_step = list(after_step)
        self._names = list(tracked)
        for name, value in tracked.items():
            if hasattr(self, name):
                raise ConfigError(f"TorchState: {name!r} is taken; give the value another name")
            if isinstance(value, torch.optim.Optimizer):
                raise ConfigError(f"TorchState: {name!r} is a second optimizer; one state moves one optimizer")
            setattr(self, name, value)
        self._snapshot = Packed(b"", [])
        step.on_decided(self._on_decided)

    # Progress --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        epoch, cursor = (self.loader.epoch, self.loader.cursor) if self.loader is not None else (0, 0)
        return Progress(self.lineage, self.step, epoch, cursor, self.boundary)

    def _on_decided(self, batch: Batch | None) -> None:
        """The rest of the atomic step; runs inside optimizer.step()."""
        for callback in self.after_step:
            callback()
        if self.loader is not None and batch is not None:
            self.loader.commit(batch.ticket)
        self.step += 1

    # Small state -----------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Remember the small state as it is now: at each boundary."""
        packed = self._pack_small()
        kept = self._snapshot.tensors
        if [(t.shape, t.dtype) for t in kept] == [(t.shape, t.dtype) for t in packed.tensors]:
            if kept:
                torch._foreach_copy_(kept, [tensor.detach() for tensor in packed.tensors])
        else:
            kept = [tensor.detach().clone() for tensor in packed.tensors]
        self._snapshot = Packed(packed.skeleton, kept)

    def put_back(self) -> None:
        """Return the small state to the last capture(), before a step is done again."""
        if self._snapshot.skeleton:
            self.load_small(unpack(self._snapshot))

    def captured(self) -> Packed:
        """What capture() remembered; the caller must not change it."""
        return self._snapshot

    def load_small(self, small: Mapping[str, Any]) -> None:
        """Take over a small state, captured here or on another worker."""
        for name, module in self._modules().items():
            for key, buffer in module.named_buffers():
                buffer.detach().copy_(small["buffers"][name][key])
        if self.optimizer is not None:
            for group, saved in zip(self.optimizer.param_groups, small["groups"], strict=True):
                group.update(saved)
        for name, saved in small["stateful"].items():
            getattr(self, name).load_state_dict(saved)
        for name, value in small["values"].items():
            setattr(self, name, value)
        self.lineage, self.step, self.boundary = small["lineage"], small["step"], small["boundary"]
        if self.loader is not None:
            self.loader.load_state_dict(small["loader"])

    def _pack_small(self) -> Packed:
        small = self._small()
        try:
            return pack(small)
        except Exception as error:
            for name, value in small["values"].items():
                _refuse_unpicklable(name, value, error)
            raise

    def _small(self) -> dict[str, Any]:
        modules = self._modules()
        others = {name: getattr(self, name) for name in self._names if name not in modules}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return {
            "lineage": self.lineage,
            "step": self.step,
            "boundary": self.boundary,
            "loader": self.loader.state_dict() if self.loader is not None else None,
            "buffers": {name: dict(module.named_buffers()) for name, module in modules.items()},
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "stateful": {name: value.state_dict() for name, value in others.items() if _is_stateful(value)},
            "values": {name: value for name, value in others.items() if not _is_stateful(value)},
        }

    # Large state -----------------------------------------------------------------------------------------

    def large(self) -> dict[str, Any]:
        """Parameters by module and name, and the optimizer's state by parameter index; live, not copied."""
        state: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._optimized()):
            if parameter in self.optimizer.state:
                state[index] = dict(self.optimizer.state[parameter])
        return {"parameters": self._parameters(), "optimizer": state}

    def load_large(self, large: Mapping[str, Any]) -> None:
        """Take over parameters and optimizer tensors that came from another worker. Raises ConfigError, with
        nothing changed, when its model has other parameters than ours."""
        ours = self._parameters()
        _refuse_other_model(ours, large["parameters"])
        with torch.no_grad():
            for name, parameters in ours.items():
                for key, parameter in parameters.items():
                    parameter.copy_(large["parameters"][name][key])
            for index, parameter in enumerate(self._optimized()):
                _load_entry(self.optimizer, parameter, large["optimizer"].get(index))

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """By module and name; those that the optimizer moves and no module has, by their place in it."""
        named: dict[str, dict[str, torch.Tensor]] = {
            name: dict(module.named_parameters()) for name, module in self._modules().items()
        }
        known = {id(parameter) for group in named.values() for parameter in group.values()}
        loose = {str(i): p for i, p in enumerate(self._optimized()) if id(p) not in known}
        return {**named, "optimizer": loose}

    def _optimized(self) -> list[torch.Tensor]:
        if self.optimizer is None:
            return []
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _modules(self) -> dict[str, torch.nn.Module]:
        named = {"model": self.model, **{name: getattr(self, name) for name in self._names}}
        return {name: value for name, value in named.items() if isinstance(value, torch.nn.Module)}


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _refuse_unpicklable(name: str, value: object, error: Exception) -> None:
    try:
        pack(value)
    except Exception:  # noqa: BLE001 - pickle raises whatever the value's own methods raise
        raise ConfigError(
            f"state.{name} of type {type(value).__name__} cannot be pickled ({error}); other workers could not "
            f"take it over: give TorchState values that can, or objects with state_dict()"
        ) from error


def _refuse_other_model(
    ours: Mapping[str, Mapping[str, torch.Tensor]], theirs: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    here = {f"{name}.{key}": tuple(p.shape) for name, group in ours.items() for key, p in group.items()}
    there = {f"{name}.{key}": tuple(p.shape) for name, group in theirs.items() for key, p in group.items()}
    for key in [*here, *there]:
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"workers have different models: parameter {key} is {here.get(key, 'missing')} here and "
                f"{there.get(key, 'missing')} on the source rank; every worker must build the same model"
            )


def _load_entry(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entry: Mapping[str, Any] | None) -> None:
    """One parameter's optimizer state: in place where the same tensor exists already, else taken as it is."""
    if entry is None:
        optimizer.state.pop(parameter, None)
        return
    live = optimizer.state[parameter]
    for key in set(live) - set(entry):
        del live[key]
    for key, value in entry.items():
        old = live.get(key)
        if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            live[key] = value
